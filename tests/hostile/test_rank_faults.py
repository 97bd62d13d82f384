"""A rank that misbehaves gets the verdict that is right for it, and what runs after it holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.leftovers import Leftovers
from hostile.trials import assert_printable
from slices import sliced

from zerocheck.case.schema import Case, Training, TrainingSegment
from zerocheck.foreign_text import printable
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.rank_pool import TARGET
from zerocheck.run.execute.trial import Trial

sys.path.insert(0, str(Path(__file__).parent))

from misbehaving import FAULTS

SUBJECTS = Path(__file__).with_name("misbehaving.py")
CASE = Case(training=Training(steps=1))
RESUMED = Case(training=Training(steps=1), resume=(TrainingSegment(),))
OFTEN = (
    "exit_0", "sys_exit", "segfault", "kill_another", "sleep", "fork_that_sleeps", "fork_and_die",
    "session_of_its_own", "close_all_descriptors", "delete_own_files", "recursion", "mute",
    "report_5", "no_shards", "endless_memory",
)  # fmt: skip
"""Those of the slice: of each kind that the file tells apart."""
LONGEST_TEXT = 100_000
AT_IMPORT = {
    "exit": ("import os\nos._exit(3)", "exit code 3"),
    "sys_exit": ("import sys\nsys.exit(3)", "SystemExit"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "sleep": ("import time\ntime.sleep(3600)", ""),
    "kill": ("import os\nos.kill(os.getpid(), 9)", "SIGKILL"),
    "fork": (
        "import os\nos.fork()\nfrom zerocheck.adapters.textbook.zero2 import Zero2", "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def left() -> Iterator[Leftovers]:
    leftovers = Leftovers()
    yield leftovers
    leftovers.kill()


@pytest.fixture(scope="module")
def pool(left: Leftovers) -> Iterator[Pool]:
    """One of its own: its zygote is killed, and its processes are counted."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in left.environment.items():
            patch.setenv(name, value)
        with Pool(TARGET, patience_s=3, ceiling_s=15, grace_s=0.4) as ranks:
            yield ranks
    left.gone(10)
    assert not left.shared_memory(os.getpid())


def living(pool: Pool) -> frozenset[int]:
    """The processes that a pool may have."""
    return frozenset((pool.zygote_pid, *(pid for pids in pool.rank_pids.values() for pid in pids)))


def assert_next_holds(pool: Pool, left: Leftovers) -> None:
    """A right implementation holds on the same pool, and on new ranks of it, once those before it
    ended: then no process is left but these."""
    for _ in range(2):
        outcome = Trial(pool, "zero2", CASE).outcome()
        assert outcome.status == "holds", outcome.detail or outcome.judgement
        if not set(left.processes()) - living(pool):
            return
        pool.renew()
    left.gone(5, but=living(pool))


@pytest.mark.every(8)
@pytest.mark.parametrize("name", sliced(tuple(FAULTS), OFTEN))
def test_its_verdict_and_the_next_one(pool: Pool, left: Leftovers, name: str) -> None:
    fault = FAULTS[name]
    case = RESUMED if fault.where in ("save", "load") else CASE
    pool.renew()  # the parent has read nothing of these ranks yet
    outcome = Trial(pool, f"{SUBJECTS}:rank_{name}", case).outcome()
    allowed = (fault.status,) if isinstance(fault.status, str) else fault.status
    assert outcome.status in allowed, outcome.detail or outcome.judgement
    assert fault.says in outcome.reason, outcome.detail
    assert len(outcome.detail) < LONGEST_TEXT
    assert_printable(printable(outcome.detail))
    assert_next_holds(pool, left)


@pytest.mark.parametrize("name", sliced(tuple(AT_IMPORT), ("exit", "fork")))
def test_while_it_is_imported(pool: Pool, left: Leftovers, tmp_path: Path, name: str) -> None:
    text, says = AT_IMPORT[name]
    (tmp_path / f"at_{name}.py").write_text(text)
    outcome = Trial(pool, f"{tmp_path}/at_{name}.py:Zero2", CASE).outcome()
    right = {"sleep": "hung", "fork": "holds"}.get(name, "crashed")
    assert outcome.status == right, outcome.detail or outcome.judgement
    assert says in outcome.reason
    assert_next_holds(pool, left)
