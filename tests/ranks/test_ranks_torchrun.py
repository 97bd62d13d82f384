"""The same API over ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from zerocheck.errors import UsageError
from zerocheck.ranks.torchrun import TorchrunPool

SCRIPT = os.path.join(os.path.dirname(__file__), "torchrun_script.py")


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


def test_outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UsageError, match=r"not set: start this with `torchrun"):
        TorchrunPool("ranks_targets:run")
