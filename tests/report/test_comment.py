"""Comment on a pull request: short, whatever a run found, and what is new stands first."""

from __future__ import annotations

from pathlib import Path

from hand_made import (
    HOSTILE,
    KNOWN,
    case,
    failed,
    finding,
    finished,
    held,
    hostile_finding,
    known,
    started,
)

from zerocheck.report.comment import FILE, MOST_LINES, render
from zerocheck.report.comparison import compare, report_of
from zerocheck.report.write import write_changes
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally


def against(now: list[Record], before: list[Record]) -> str:
    changes = compare(report_of(tally(now)), report_of(tally(before)))
    return render(tally(now), changes)


def test_the_verdict_stands_first() -> None:
    def headline(records: list[Record]) -> str:
        title, *_ = render(tally(records)).splitlines()
        assert title.startswith("### zerocheck: ")
        return title.removeprefix("### zerocheck: ")

    assert headline(held()) == "all obligations hold"
    assert headline(known()) == "no new finding. 1 known issue reproduced (silent)"
    assert headline(failed()) == "2 findings"
    assert headline([started(), case(0)]) == "not finished, 1 of 4 cases"


def test_findings_come_with_their_replay() -> None:
    text = render(tally(failed()))
    assert "- **violated** zero2, gradient: the reduced gradient is 4 times too large\n" in text
    assert "  `zerocheck replay zerocheck-report/findings/zero2-gradient.json`\n" in text


def test_what_was_wrong_before_is_not_new() -> None:
    violated = case(1, status="violated", gradient="violated")
    now = [started(), case(0), violated, finding(), finished(1)]
    assert "1 finding, 1 of them new" in against(now, held())
    same = against(now, now)
    assert "1 finding, none of them new" in same and "**violated**" not in same
    fixed = "- fixed: zero2, the reduced gradient is 4 times too large, zero2 / gradient / x W\n"
    assert fixed in against(held(), now)


def test_it_is_short_whatever_there_is() -> None:
    many = [finding(number=n, fingerprint=f"zero2 / gradient / {n}") for n in range(40)]
    listed = [
        finding(number=50 + n, fingerprint=f"zero2 / update / {n}", known=KNOWN) for n in range(9)
    ]
    violated = case(1, status="violated", gradient="violated", update="violated")
    now = [started(), violated, *many, *listed, finished(1)]
    for text in (against(now, held()), against(held(), now), render(tally(now))):
        assert len(text.splitlines()) <= MOST_LINES
    assert "- and 35 more" in render(tally(now))


def test_names_are_no_markup() -> None:
    text = render(tally([started(HOSTILE), hostile_finding(), finished(1)]))
    assert "<b>" not in text and len(text.splitlines()) <= MOST_LINES


def test_a_comparison_writes_it_anew(tmp_path: Path) -> None:
    now = tally(held())
    write_changes(now, compare(report_of(now), report_of(now)), tmp_path)
    assert (tmp_path / FILE).read_text().startswith("### zerocheck: ")
