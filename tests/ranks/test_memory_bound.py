"""A rank that takes ever more memory fails, and neither the machine nor another process does."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
from ranks_asking import TARGET

from zerocheck.ranks import Pool
from zerocheck.ranks import pool as pools
from zerocheck.ranks.cores import Cores
from zerocheck.ranks.limits import SHARE, MemoryBound, room


@pytest.mark.every(2)
@pytest.mark.parametrize("argument", ["", "tensors"])
def test_a_rank_that_takes_ever_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    """It says how much it had of how much, and the ranks after it have the whole again."""
    monkeypatch.setattr(pools, "room", lambda *_: 300_000_000)
    with Pool(TARGET, patience_s=2.0, grace_s=0.4, cores=Cores(directory=str(tmp_path))) as pool:
        result = pool.wait(pool.submit(2, f"endless {argument}".encode()))
        assert result.outcome == "crashed" and result.first_failed == 0
        message = result.rank_outcomes[0].text
        held = re.match(r"out of memory: the rank held up to (0\.\d+) GB of the 0.3 GB", message)
        assert held is not None and 0.2 < float(held[1]) < 0.35, message
        assert pool.wait(pool.submit(2, b"put 30000000")).outcome == "finished"


def test_ranks_of_a_job_share_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one may have all that the job was reckoned to need."""
    monkeypatch.setattr("zerocheck.ranks.limits.available_bytes", lambda: 100)
    assert room(1) == int(SHARE * 100) and room(4) == int(SHARE * 100) // 4
    assert room(4, 70) == int(SHARE * 100) // 4 + 70
    monkeypatch.setattr("zerocheck.ranks.limits.available_bytes", lambda: None)
    assert room(4, 70) == 0


@pytest.mark.parametrize("bytes_", [0, 1 << 40])
def test_a_limit_that_the_user_set_stays(bytes_: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    own = (1 << 50, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, own)
    try:
        with MemoryBound(bytes_):
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] <= own[0]
        assert resource.getrlimit(resource.RLIMIT_DATA) == own
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_what_is_free_again_was_held() -> None:
    """An exception often leaves the frames that held it."""
    bound = MemoryBound(1 << 40)

    def use() -> None:
        data = bytearray(b"1") * 300_000_000
        del data
        raise MemoryError

    with pytest.raises(MemoryError), bound:
        use()
    held = re.search(r"held up to (\S+) GB", bound.words)
    assert held is not None and 0.2 < float(held[1]) < 0.6


def test_a_job_has_room_on_this_machine() -> None:
    assert room(2) > 100_000_000 or not os.path.exists("/proc/meminfo")
