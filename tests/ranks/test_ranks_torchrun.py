"""The same API over ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from zerocheck.errors import UsageError
from zerocheck.ranks.result import JobResult, RankOutcome
from zerocheck.ranks.torchrun import TorchrunPool

SCRIPT = os.path.join(os.path.dirname(__file__), "torchrun_script.py")


@pytest.mark.every(2)
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_jobs_under_torchrun(where: str) -> None:
    """An exception on rank 1 is reported as first, and the group is made again for the next job."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, where],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert "torchrun started 2 ranks, so world size 5 cannot run" in found["refused"]
    crashed = "crashed"
    assert found["outcomes"] == ["finished", crashed, "finished", crashed, "finished", "finished"]
    assert found["first"] == 1
    assert "rank 1 raised ranks_targets.OwnError: only here" in found["summary"]
    assert "Timed out" in found["summary"]
    count = 2_000_000
    exact = sum(float(n) + 1000 for n in range(count))
    assert found["sum"] == pytest.approx(exact, rel=1e-6)
    # Ranks that ran out of time at one place may have been slow: they are given more of it.
    in_vain = "collectives waited for 2 s in vain"
    assert found["late"] == [["hung", in_vain], ["finished", ""], ["finished", ""]]


def test_ranks_that_hang_at_one_place_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time they had longer, and both waits are said."""
    pool: Any = object.__new__(TorchrunPool)
    pool._asked_s = pool._timeout_s = 2.0
    pool._broken, pool.waited = "", []
    alike = tuple(RankOutcome(rank=rank, state="waiting", where="step 1") for rank in range(2))

    def run(_pending: object) -> JobResult:
        pool.waited.append(pool._timeout_s)
        return JobResult("hung", (), (), alike, 1.0, reason=f"waited for {pool._timeout_s:g} s")

    monkeypatch.setattr(pool, "_run", run)
    assert pool._patiently(None).reason == (
        "waited for 8 s, and for 2 s in the process group before"
    )
    assert pool._patiently(None).outcome == "hung" and pool.waited == [2, 8, 8, 8]
    alike = (alike[0], RankOutcome(rank=1, state="waiting", where="step 2"))
    assert pool._patiently(None).reason == "waited for 8 s" and len(pool.waited) == 5


def test_outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UsageError, match=r"not set: start this with `torchrun"):
        TorchrunPool("ranks_targets:run")
