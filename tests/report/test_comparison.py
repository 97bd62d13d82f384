"""A run beside an earlier one, from records made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hand_made import ENVIRONMENT, KNOWN, case, failed, finding, finished, held, known, started
from rich.console import Console

from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import MeasuredBytes
from zerocheck.report import comparison_text
from zerocheck.report.comparison import Changes, compare, read_report, report_of
from zerocheck.report.write import AGAINST_FORMATS, write_changes, write_reports
from zerocheck.run.records.journal import Journal
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally

NEWER = msgspec.structs.replace(ENVIRONMENT, torch="2.14.0")


def changes(now: Sequence[Record], before: Sequence[Record]) -> Changes:
    return compare(report_of(tally(now)), report_of(tally(before)))


def run(*cases: Record, **given: Any) -> list[Record]:
    return [started(**given), *cases, finished()]


def rows(found: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(row.of, row.what, row.before, row.now) for row in found]


VIOLATED = case(1, status="violated", gradient="violated", publish="violated")


def test_nothing_changed() -> None:
    same = changes(held(), held())
    assert same.exit_code == 0 and same.notes == ["the cases are the same"]
    data = json.loads(comparison_text.as_json(same))
    assert all(value in ([], 0, 1, same.notes) for value in data.values())
    assert comparison_text.outcome(same) == "nothing is newly violated"


def test_runs_of_other_code_are_not_compared() -> None:
    now, before = [started("zero3"), case(0, "zero3"), finished()], run(case(0))
    assert changes(now, before).exit_code == 1


def test_newly_violated_and_fixed() -> None:
    good, bad = run(case(0), case(1)), run(case(0), VIOLATED, finding())
    new = changes(bad, good)
    assert new.exit_code == 1
    assert rows(new.newly_violated) == [
        ("zero2", "the reduced gradient is 4 times too large", "", "zero2 / gradient / x W"),
        ("zero2", "publish", "holds", "violated"),
    ]
    gone = changes(good, bad)
    assert gone.exit_code == 0 and not gone.newly_violated
    assert [row[2] for row in rows(gone.fixed)] == ["zero2 / gradient / x W"]
    still = changes(bad, bad)
    assert still.exit_code == 0 and not still.newly_violated and not still.fixed


def test_another_bug_in_an_obligation_that_was_violated_is_new() -> None:
    old = run(VIOLATED, finding())
    new = run(VIOLATED, finding(fingerprint="zero2 / gradient / x GA", title="x GA"))
    found = changes(new, old)
    assert found.exit_code == 1
    assert [row[3] for row in rows(found.newly_violated)] == ["zero2 / gradient / x GA"]
    assert [row[2] for row in rows(found.fixed)] == ["zero2 / gradient / x W"]


def test_a_crash_is_newly_violated_once() -> None:
    found = changes(failed(), [started("zero2", "ddp"), case(), case(1, "ddp"), finished()])
    assert [row[:2] for row in rows(found.newly_violated)] == [
        ("zero2", "the reduced gradient is 4 times too large"),
        ("ddp", "the ranks crashed: IndexError"),
    ]


def test_known_issues() -> None:
    found = changes(known(), held())
    assert found.exit_code == 0 and not found.newly_violated
    assert [row[3] for row in rows(found.newly_known)] == [finding().fingerprint]
    assert [row[2] for row in rows(changes(held(), known()).fixed)] == [finding().fingerprint]
    # No longer listed, it is violated now.
    unlisted = run(case(), VIOLATED, finding())
    assert changes(unlisted, known()).exit_code == 1
    assert KNOWN.fingerprint == finding().fingerprint


def test_unsupported_and_not_exercised() -> None:
    before = run(case(0), case(1, mesh=(3,)), case(2, status="unsupported", reason="no mesh"))
    now = run(
        case(0), case(1, mesh=(3,), status="unsupported", reason="no odd world"), case(2)
    )  # fmt: skip
    found = changes(now, before)
    assert sorted(rows(found.unsupported)) == [
        ("zero2", "no mesh", 1, 0),
        ("zero2", "no odd world", 0, 1),
    ]
    assert "world-3" in [row[1] for row in rows(found.newly_not_exercised)]
    assert "world-3" in [row[1] for row in rows(changes(before, now).newly_exercised)]
    assert found.exit_code == 0


def test_an_obligation_that_is_no_longer_checked_fails() -> None:
    lost = run(case(status="unsupported", reason="no torch of this version"))
    found = changes(lost, run(case()))
    assert found.exit_code == 1 and not found.newly_violated
    assert ("zero2", "gradient", "holds", "unsupported") in rows(found.no_longer_checked)
    # Left out on purpose, it is only said.
    fewer = run(case(), obligations=("gradient",))
    found = changes(fewer, run(case()))
    assert found.exit_code == 0 and "the runs differ in obligations" in found.notes[0]


def test_shares_that_moved_the_farthest_first() -> None:
    def shares(**given: float) -> Record:
        record = case()
        assert record.judgement is not None
        share: dict[Any, float] = {
            **dict.fromkeys(("loss", "update", "clip", "gradient"), 0.25),
            **given,
        }
        judgement = msgspec.structs.replace(record.judgement, share=share)
        return msgspec.structs.replace(record, judgement=judgement)

    found = changes(run(shares(update=0.5, clip=0.05, gradient=0.2500001)), run(shares()))
    assert [(row.what, round(row.factor, 3)) for row in found.shares] == [
        ("clip", 0.2), ("update", 2.0), ("gradient", 1.0),
    ]  # fmt: skip
    found = changes(run(shares(loss=float("inf"))), run(shares(update=0.0)))
    assert {row.what for row in found.shares} == {"loss", "update"}
    assert all(row.factor == float("inf") for row in found.shares)
    assert '"now": "inf"' in comparison_text.as_json(found)


def test_memory_that_moved() -> None:
    def held(**of_three: Any) -> list[dict[str, Any]]:
        two = {"world_size": 2, "held": 100, "ratios": [1.0, 1.5], "layout": True}
        return [two, {**two, "world_size": 3, **of_three}]

    before, now = report_of(tally(failed())), report_of(tally(failed()))
    before.implementations["zero2"].memory = held()
    now.implementations["zero2"].memory = held(held=300, ratios=[1.0, 1.2], layout=False)[::-1]
    assert rows(compare(now, before).memory) == [
        ("zero2", "3 ranks, held", 100, 300),
        ("zero2", "3 ranks, ratios, 1", 1.5, 1.2),
    ]


def test_bytes_of_measured_cases() -> None:
    """In the form that report.json has them in."""
    measured_bytes = MeasuredBytes(
        copy=(4000, 4000, 8000), held=4120, total=16400, sent=9000.0, trained=4000,
        elements=1000, stage=3, predicted=True,
    )  # fmt: skip

    def measured(of: MeasuredBytes) -> list[Record]:
        one = case(mesh=(4,))
        assert one.judgement is not None
        judgement = msgspec.structs.replace(one.judgement, measured_bytes=of)
        return run(msgspec.structs.replace(one, judgement=judgement))

    more = msgspec.structs.replace(measured_bytes, held=8240, sent=27000.0)
    found = {
        row.what: row.factor for row in changes(measured(more), measured(measured_bytes)).memory
    }
    assert found["4 ranks, held"] == found["4 ranks, ratio"] == 2.0
    assert found["4 ranks, sent"] == found["4 ranks, sent_psi"] == 3.0
    assert "4 ranks, elements" not in found


def test_what_limits_the_comparison() -> None:
    other = [started("zero2", "ddp", seed=3, environment=NEWER), case(mesh=(3,)), finished()]
    found = changes(other, [started("zero2", "zero3"), case()])
    assert found.notes == [
        "the runs differ in seed: 0, now 3",
        "the earlier run did not finish: it has 1 case",
        "the cases are not the same for zero2: a finding may be new, or gone, since other cases "
        "were run",
        "only in the earlier run, and not compared: zero3",
        "only in this run, and not compared: ddp",
    ]
    assert rows(found.environment) == [("", "torch", "2.13.0", "2.14.0")]
    assert changes(held()[:-1], held()).exit_code == 130


@pytest.mark.parametrize("form", ["journal.ndjson", "report.json", ""])
def test_every_form_of_an_earlier_run(tmp_path: Path, form: str) -> None:
    with Journal(tmp_path / "journal.ndjson") as journal:
        for record in failed():
            journal.handle(record)
    write_reports(failed(), tmp_path)
    assert read_report(tmp_path / form) == report_of(tally(failed()))
    if not form:
        (tmp_path / "journal.ndjson").unlink()
        assert read_report(tmp_path) == report_of(tally(failed()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garbage", "not a record of a journal"),
        ("[1]", "is no report.json of format 2, and no journal"),
        ('{"format": 1}', "is no report.json of format 2, and no journal"),
        ('{"format": 2}', "is not a report.json: Object missing required field"),
        ('{"type": "faults started"}', "is the journal of a kill matrix"),
        (None, "cannot read .*old: No such file"),
    ],
)
def test_what_is_no_earlier_run(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "old").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_report(tmp_path / "old")


def test_all_forms_say_all(tmp_path: Path) -> None:
    now = [
        started(environment=NEWER),
        case(0, share=0.5),
        VIOLATED,
        case(2, status="unsupported", reason="no *stars*"),
        finding(),
        finished(1),
    ]
    found = changes(now, held())
    console = Console(record=True, width=400, highlight=False)
    comparison_text.print_changes(console, found)
    text = console.export_text()
    counted = tally(now)
    written = {path.name: path.read_text() for path in write_changes(counted, found, tmp_path)}
    assert set(written) == {*AGAINST_FORMATS, "comment.md"}
    for message in ("2.13.0", "2.14.0", "zero2 / gradient / x W", "no *stars*", "0.25", "0.5"):
        assert message in text and message in written["against.json"]
    assert r"no \*stars\*" in written["against.md"] and "## Newly violated" in written["against.md"]
    assert text.strip().endswith("2 newly violated")
