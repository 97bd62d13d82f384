"""The kill matrix for real, over a few faults: what is caught, what escapes, what a row says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from borrowing import borrowed
from hand_made_faults import started, tried

from zerocheck.errors import UsageError
from zerocheck.faults.registry import FAULTS
from zerocheck.kill_matrix import options
from zerocheck.kill_matrix.engine import run
from zerocheck.kill_matrix.hunt import SOLVED, rubric
from zerocheck.kill_matrix.options import MatrixOptions
from zerocheck.ranks.pool import Pool
from zerocheck.run.records.journal import Journal, is_matrix, read, read_matrix
from zerocheck.run.records.matrix_records import (
    ATTRIBUTED,
    FaultsFinished,
    FaultsStarted,
    FaultTried,
    MatrixRecord,
)
from zerocheck.run.records.matrix_summary import Summary

SIZES = (2, 3)
SUBJECTS = Path(__file__).parent.parent / "run" / "subjects.py"


class Collect(list[MatrixRecord]):
    """A handler that keeps every record, and may be told to interrupt."""

    interrupt_after = -1

    def handle(self, record: MatrixRecord) -> None:
        self.append(record)
        if len(self) == self.interrupt_after:
            raise KeyboardInterrupt

    def row(self, name: str) -> FaultTried:
        return next(r for r in self if isinstance(r, FaultTried) and r.fault == name)


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=1.5) as ranks:
        yield ranks


def matrix(pool: Pool, *names: str, **given: object) -> tuple[int, Collect]:
    collected = Collect()
    asked = {"profile": "quick", "world_sizes": SIZES} | given
    return run(MatrixOptions(names=names, **asked), [collected], ranks=pool), collected  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def few(pool: Pool) -> tuple[int, Collect]:
    """Three of the catalogue, and one that breaks every time."""
    names = ("average-becomes-sum", "decay-twice", "rank-shards-lost")
    raises = replace(
        FAULTS["decay-twice"],
        name="raises",
        where=f"{SUBJECTS}:RaisesOnOneRank",
        parent=f"{SUBJECTS}:build",
        obligation=None,
        causes=(),
    )
    planted = {**{name: FAULTS[name] for name in names}, "raises": raises}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "FAULTS", planted)
        return matrix(pool)


def test_all_are_caught(few: tuple[int, Collect]) -> None:
    code, records = few
    assert code == 0
    assert isinstance(records[0], FaultsStarted) and isinstance(records[-1], FaultsFinished)
    assert records[-1].exit_code == 0 and records[-1].outcome == "done"
    for name in ("average-becomes-sum", "decay-twice", "rank-shards-lost"):
        assert records.row(name).caught_by == FAULTS[name].obligation
    assert records.row("raises").caught_by == "crashed"


def test_a_row_says_how_soon_and_why(few: tuple[int, Collect]) -> None:
    row = few[1].row("average-becomes-sum")
    assert (row.where, row.parent) == ("zerocheck.faults.gradient:AverageBecomesSum", "zero2")
    assert 1 <= row.cases <= 10 and row.seconds > 0 and row.case is not None
    assert row.failing >= 3 and row.named
    assert "gradient x W" in row.causes
    assert row.diagnosis is not None and 0 <= row.diagnosis < 60


def test_attribution_says_the_true_cause_without_names(pool: Pool) -> None:
    code, collected = matrix(pool, "average-becomes-sum", "decay-twice", without_names=True)
    rows = [record for record in collected if isinstance(record, FaultTried)]
    assert code == 0 and len(rows) == 2
    for row in rows:
        solved = FAULTS[row.fault].obligation in SOLVED
        assert bool(row.causes) == solved
        assert row.attributed, row.attributions
    assert str(Summary(collected).attributed) == "2 of 2 (100 %)"


def test_an_attribution_must_match_in_every_failing_case() -> None:
    row = tried("x", rubric="counts 2", attributions=("it counts 2 times", "it counts 3 times"))
    assert row.attributed is False
    assert tried("x", rubric="counts", attributions=row.attributions).attributed
    assert tried("x", rubric="", attributions=row.attributions).attributed is False
    assert tried("x", rubric="counts", expected="clip").attributed is None
    assert tried("x", rubric="counts", caught_by="").attributed is None
    both = Summary([started("x"), row])
    assert (both.attributed.count, both.explained.count) == (0, 1)


def test_every_fault_that_is_to_be_attributed_has_a_pattern() -> None:
    without = []
    for fault in FAULTS.values():
        pattern = rubric(fault)
        re.compile(pattern)
        if fault.obligation in ATTRIBUTED and not pattern:
            without.append(fault.name)
    assert without == []


@pytest.mark.long
def test_the_smallest_case_is_looked_for_where_it_is_asked_for(
    few: tuple[int, Collect], pool: Pool
) -> None:
    assert not Summary(few[1]).shrunk
    _, records = matrix(pool, "average-becomes-sum", "decay-twice", shrink=True)
    summary = Summary(records)
    assert list(summary.shrunk) == ["average-becomes-sum", "decay-twice"]
    one = summary.shrunk["average-becomes-sum"]
    assert one.case is not None and one.case.world_size == one.ranks == 2
    assert (one.size, one.tries > 0) == ("2 ranks, no blocks, 1 step", True)
    assert {str(share) for share in summary.small.values()} == {"2 of 2 (100 %)"}


def test_what_nobody_looks_for_escapes(pool: Pool) -> None:
    code, records = matrix(pool, "decay-twice", obligations=("ownership",), max_cases=4)
    row = records.row("decay-twice")
    assert code == 1 and not row.caught
    assert row.cases == 4 and row.case is None
    assert Summary(records).escaped == [row]


@pytest.mark.long
def test_the_cases_are_those_of_a_run(pool: Pool) -> None:
    """Of the profile, the seed and the world sizes that were asked for."""
    _, records = matrix(pool, "decay-twice", world_sizes=(3,), seed=5)
    row = records.row("decay-twice")
    assert row.case is not None and row.case.world_size == 3
    started = records[0]
    assert isinstance(started, FaultsStarted)
    assert (started.profile, started.seed, started.world_sizes) == ("quick", 5, (3,))


def test_a_case_that_the_parent_fails_too_says_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has the same bug here, so nothing is caught by it."""
    bug = "zerocheck.faults.update:DecayTwice"
    planted = replace(FAULTS["decay-twice"], parent=bug)
    monkeypatch.setattr(options, "NAMED_FAULTS", {"decay-twice": planted})
    code, records = matrix(pool, "decay-twice", max_cases=3)
    row = records.row("decay-twice")
    assert code == 1 and not row.caught and row.parents >= 1


@pytest.mark.long
def test_an_interrupt_loses_nothing_that_is_known(pool: Pool, tmp_path: Path) -> None:
    names = ("average-becomes-sum", "double-average", "decay-twice")
    stop = Collect()
    stop.interrupt_after = 2
    asked = MatrixOptions(names=names, profile="quick", world_sizes=SIZES)
    with Journal(tmp_path / "faults.ndjson") as journal, pytest.raises(KeyboardInterrupt):
        run(asked, [journal, stop], ranks=pool)
    records = read_matrix(journal.path)
    summary = Summary(records)
    assert summary.tried >= 1 and not summary.complete and summary.exit_code == 130
    assert isinstance(records[-1], FaultsFinished) and records[-1].exit_code == 130


def test_the_journal_round_trips(few: tuple[int, Collect], tmp_path: Path) -> None:
    with Journal(tmp_path / "faults.ndjson") as journal:
        for record in few[1]:
            journal.handle(record)
    assert is_matrix(journal.path)
    assert read_matrix(journal.path) == few[1]
    with pytest.raises(UsageError, match="line 1: "):
        read(journal.path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": ("gather-stal",)}, "unknown fault 'gather-stal'; did you mean 'gather-stale'?"),
        ({"profile": "cj"}, "unknown profile 'cj'; did you mean 'ci'?"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"max_cases": 0}, "max cases 0 is out of range"),
        ({"implementation": "fsdp"}, "unknown implementation 'fsdp'; did you mean 'fsdp2'?"),
        (
            {"implementation": "fsdp2", "names": ("decay-twice",)},
            "unknown fault to inject 'decay-twice'",
        ),
    ],
)
def test_wrong_usage(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        MatrixOptions(**given)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_without_names_all_faults_are_hunted() -> None:
    assert [fault.name for fault in MatrixOptions().faults] == list(FAULTS)
    twice = MatrixOptions(names=("decay-twice", "decay-twice"))
    assert [fault.name for fault in twice.faults] == ["decay-twice"]


def test_injected_faults_are_for_any_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, whatever number of parents the catalogue has them on, and no others."""
    planted = FAULTS["decay-twice"]
    rows = {
        name: replace(planted, name=name, where=name, parent=name.partition("+")[0])
        for name in ("fsdp2+average-becomes-sum", "ddp+average-becomes-sum", "ddp+double-average")
    }
    monkeypatch.setattr(options, "FAULTS", {"decay-twice": planted, **rows})
    chosen = options._injected((), "my.py:Mine")
    assert [(fault.name, fault.where, fault.parent) for fault in chosen] == [
        ("average-becomes-sum", "my.py:Mine+average-becomes-sum", "my.py:Mine"),
        ("double-average", "my.py:Mine+double-average", "my.py:Mine"),
    ]
    (one,) = options._injected(("double-average",), "my.py:Mine")
    assert one == chosen[1]
    with pytest.raises(UsageError, match="did you mean 'double-average'"):
        options._injected(("duble-average",), "my.py:Mine")
