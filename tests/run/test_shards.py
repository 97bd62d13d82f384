"""A run over several machines is the run that one machine does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from collected import Collect

from zerocheck.ranks.pool import Pool
from zerocheck.report.write import write_reports
from zerocheck.run.engine import run
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.run_shard import RunShard
from zerocheck.run.records.journal import Journal
from zerocheck.run.records.records import (
    CaseFinished,
    Finding,
    Record,
    RunFinished,
    RunStarted,
    StaleIssue,
)

SUBJECTS = Path(__file__).parent / "subjects.py"
WRONG = f"{SUBJECTS}:not_averaged"
COUNT = 3
TIMES = ("seconds", "judge_seconds", "started")
OF_SHARDS = ("reused", "missing_shards")


class Runs:
    """Runs of the same command. Each leaves its records, its journal and its exit code."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self.codes: dict[str, int] = {}
        self.records: dict[str, list[Record]] = {}

    def run(self, name: str, **given: Any) -> list[Record]:
        options = RunOptions(
            implementations=("zero-redundancy", WRONG),
            profile="smoke",
            world_sizes=(1, 2, 3),
            max_cases=4,
            report_dir=self.folder / name,
            **given,
        )
        collected = Collect()
        with Journal(self.folder / name / "journal.ndjson") as journal:
            self.codes[name] = run(options, (journal, collected), ranks=self.pool)
        self.records[name] = collected
        return collected


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    done = Runs(pool, tmp_path_factory.mktemp("runs"))
    done.run("one")
    for number in range(1, COUNT + 1):
        done.run(f"shards/{number}", shard=RunShard(number, COUNT))
    done.run("all", reuse=(done.folder / "shards",))
    return done


def timeless(records: Iterable[Record], folder: Path) -> list[object]:
    """The records without times, paths, and what says that others ran the cases.

    Of a crash, which rank failed first is a matter of time too.
    """

    def plain(value: object) -> object:
        if isinstance(value, dict):
            crash = ("reason", "detail") if value.get("status") == "crashed" else ()
            but = (*TIMES, *OF_SHARDS, *crash)
            return {key: plain(one) for key, one in value.items() if key not in but}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value.replace(str(folder), "") if isinstance(value, str) else value

    return [plain(msgspec.to_builtins(record)) for record in records]


def test_all_shards_together_are_one_run(runs: Runs) -> None:
    """Verdicts, findings with their smallest cases and extents, and the exit code."""
    alone, together = runs.records["one"], runs.records["all"]
    assert [type(one) for one in together] == [type(one) for one in alone]
    assert timeless(together, runs.folder / "all") == timeless(alone, runs.folder / "one")
    assert runs.codes["all"] == runs.codes["one"] == 1
    found = {one.fingerprint for one in alone if isinstance(one, Finding) and one.known is None}
    assert f"{WRONG} / gradient / gradient x W" in found


def test_their_reports_are_the_same(runs: Runs) -> None:
    for name in ("one", "all"):
        write_reports(runs.records[name], runs.folder / name)
    for file in ("conformance.md", "comment.md"):
        alone, together = (
            (runs.folder / name / file).read_text().replace(str(runs.folder / name), "")
            for name in ("one", "all")
        )
        assert alone == together


def test_nothing_is_run_twice(runs: Runs) -> None:
    (begun,) = (one for one in runs.records["all"] if isinstance(one, RunStarted))
    assert begun.reused == begun.planned > 8 and begun.missing_shards == ()
    shards = [runs.records[f"shards/{number}"] for number in range(1, COUNT + 1)]
    numbers = [one.number for records in shards for one in records if isinstance(one, CaseFinished)]
    assert sorted(numbers) == list(range(begun.planned))


def test_a_shard_fails_for_what_is_wrong_in_it_alone(runs: Runs) -> None:
    """What no case of it exercised is for all together, as are stale issues."""
    for number in range(1, COUNT + 1):
        name = f"shards/{number}"
        records = runs.records[name]
        wrong = any(isinstance(one, Finding) and one.known is None for one in records)
        assert runs.codes[name] == wrong
        assert not any(isinstance(one, StaleIssue) for one in records)
        (finished,) = (one for one in records if isinstance(one, RunFinished))
        assert not any("nothing was checked" in reason for reason in finished.why)
    assert any(runs.codes[f"shards/{number}"] for number in range(1, COUNT + 1))


def test_cases_of_a_missing_shard_are_run(runs: Runs) -> None:
    given = tuple(runs.folder / "shards" / str(number) for number in (1, 3))
    records = runs.run("missing", reuse=given)
    (begun,) = (one for one in records if isinstance(one, RunStarted))
    assert begun.missing_shards == ("2/3",) and 0 < begun.reused < begun.planned
    alone = timeless(runs.records["one"], runs.folder / "one")
    assert timeless(records, runs.folder / "missing") == alone


@pytest.mark.long
def test_an_interrupted_run_goes_on(runs: Runs) -> None:
    """From its journal, which ends in the middle of a line."""
    lines = (runs.folder / "one" / "journal.ndjson").read_bytes().splitlines(keepends=True)
    torn = runs.folder / "continued" / "journal.ndjson"  # where the run that goes on has its own
    torn.parent.mkdir()
    torn.write_bytes(b"".join(lines[:9]) + lines[9][:40])
    records = runs.run("continued", reuse=(torn,))
    (begun,) = (one for one in records if isinstance(one, RunStarted))
    assert 0 < begun.reused < begun.planned and begun.missing_shards == ()
    alone = timeless(runs.records["one"], runs.folder / "one")
    assert timeless(records, runs.folder / "continued") == alone
