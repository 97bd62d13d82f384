"""Outcomes of other runs: which are taken, and which journals are refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hand_made import ENVIRONMENT, case, started

from zerocheck.errors import UsageError
from zerocheck.run.execute.reused import ReusedOutcomes, sources_of
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.journal import Journal
from zerocheck.run.records.records import Record, RunStarted

OPTIONS = RunOptions(implementations=("zero2",))


def begun(**given: object) -> RunStarted:
    record = started(obligations=OPTIONS.obligations)
    return msgspec.structs.replace(record, environment=ENVIRONMENT, **given)  # type: ignore[arg-type]


def journal(path: Path, records: Iterable[Record]) -> Path:
    with Journal(path) as written:
        for record in records:
            written.handle(record)
    return path


def reused(*paths: Path, options: RunOptions = OPTIONS) -> ReusedOutcomes:
    values = {name: getattr(options, name) for name in ("implementations", "model", "obligations")}
    return ReusedOutcomes(RunOptions(**values, reuse=paths), ENVIRONMENT)


def test_a_case_is_taken_as_it_was_judged(tmp_path: Path) -> None:
    done = case(5, status="violated")
    found = reused(journal(tmp_path / "journal.ndjson", [begun(), done]))
    outcome = found.of("zero2", done.case)
    assert outcome is not None and outcome.record(5, "zero2", done.case) == done
    assert found.of("zero3", done.case) is None
    assert found.of("zero2", case(6, mesh=(5,)).case) is None
    assert found.missing == ()


def test_what_fresh_rank_processes_judged_otherwise_is_run_again(tmp_path: Path) -> None:
    done = msgspec.structs.replace(case(5), unreproduced="a wrong gradient")
    found = reused(journal(tmp_path / "journal.ndjson", [begun(), done]))
    assert found.of("zero2", done.case) is None


def test_missing_shards_are_said(tmp_path: Path) -> None:
    for number in (1, 2, 11):
        folder = tmp_path / str(number)
        journal(folder / "journal.ndjson", [begun(shard=f"{number}/12"), case(number)])
    missing = reused(tmp_path).missing
    assert missing == tuple(f"{number}/12" for number in (3, 4, 5, 6, 7, 8, 9, 10, 12))
    journal(tmp_path / "other" / "journal.ndjson", [begun(shard="1/2")])
    with pytest.raises(UsageError, match="of 2 and of 12 shards; give those of one run"):
        reused(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("torch", "2.12.1", r"torch was 2\.12\.1; here it is 2\.13\.0"),
        ("zerocheck", "0.0.9", r"zerocheck was 0\.0\.9; here it is 0\.1\.0"),
        ("libraries", "deepspeed 0.19.8", r"libraries was deepspeed 0\.19\.8; here it is none"),
        ("device", "cuda", "device was cuda; here it is cpu"),
    ],
)
def test_another_environment_is_refused(
    tmp_path: Path, field: str, value: str, message: str
) -> None:
    there = msgspec.structs.replace(ENVIRONMENT, **{field: value})  # type: ignore[arg-type]
    path = journal(tmp_path / "j", [msgspec.structs.replace(begun(), environment=there), case(0)])
    with pytest.raises(UsageError, match=message):
        reused(path)


def test_another_processor_is_not(tmp_path: Path) -> None:
    """Machines of a run differ; the verdicts have bounds."""
    there = msgspec.structs.replace(ENVIRONMENT, cpu="another", cores=64, platform="elsewhere")
    path = journal(tmp_path / "j", [msgspec.structs.replace(begun(), environment=there), case(0)])
    assert reused(path).of("zero2", case(0).case) is not None


def test_other_obligations_are_refused(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", [msgspec.structs.replace(begun(), obligations=("loss",))])
    with pytest.raises(UsageError, match="it judged loss; this run judges ownership, loss,"):
        reused(path)


def test_changed_code_is_refused(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("one = 1\n")
    config = tmp_path / "ds_config.json"
    config.write_text("{}\n")
    names = (f"{code}:build+gather-stale", f"{config}", "zero2", "package.module:build")
    options = RunOptions(implementations=names)
    assert sources_of(options).keys() == {str(code), str(config)}
    path = journal(tmp_path / "j", [begun(sources=sources_of(options)), case(0)])
    assert reused(path, options=options).of("zero2", case(0).case) is not None
    code.write_text("one = 2\n")
    with pytest.raises(UsageError, match=r"mine\.py is not what it was; run its cases again"):
        reused(path, options=options)


def test_earlier_runs_in_a_directory_are_left_alone(tmp_path: Path) -> None:
    """A shard that ran twice keeps its first journal in its directory."""
    first, second = case(0), case(1, mesh=(5,))
    for done in (first, second):
        journal(tmp_path / "1" / "journal.ndjson", [begun(shard="1/1"), done])
    found, before = reused(tmp_path), reused(tmp_path / "1" / "earlier")
    assert found.of("zero2", first.case) is None and before.of("zero2", first.case) is not None
    assert found.of("zero2", second.case) is not None and before.of("zero2", second.case) is None


def test_a_directory_without_journals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no journal\.ndjson is in this directory, or below it"):
        reused(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        reused(tmp_path / "absent.ndjson")
