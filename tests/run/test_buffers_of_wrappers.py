"""Buffers of functions that declare nothing: DDP sends those of rank 0, and code may do so too."""

from __future__ import annotations

from pathlib import Path

from collected import Collect

from zerocheck.ranks.pool import Pool
from zerocheck.run.engine import run
from zerocheck.run.plan.options import RunOptions

SUBJECTS = Path(__file__).parent / "subjects.py"


def asked(pool: Pool, name: str, folder: Path) -> tuple[int, Collect]:
    records = Collect()
    options = RunOptions(
        report_dir=folder,
        implementations=(f"{SUBJECTS}:{name}",),
        world_sizes=(2,),
        features=("block-batch-norm",),
        obligations=("buffers",),
        max_cases=2,
        shrink=False,
    )
    return run(options, [records], ranks=pool), records


def test_a_ddp_says_by_itself_that_rank_0_sends_them(pool: Pool, tmp_path: Path) -> None:
    """Plain DDP was violated in each case with batch norm on several ranks."""
    code, _ = asked(pool, "plain_ddp", tmp_path)
    assert code == 0


def test_what_rank_0_sends_is_named(pool: Pool, tmp_path: Path) -> None:
    code, records = asked(pool, "sends_buffers", tmp_path)
    assert code == 1
    assert all("buffers sent each time" in one.causes for one in records.tally.findings)
