"""The console, as a terminal and as a file."""

from __future__ import annotations

import io
import re
import time

import pytest
from hand_made import (
    HOSTILE,
    case,
    failed,
    finding,
    finished,
    held,
    hostile_finding,
    known,
    stale,
    started,
)
from rich.console import Console

from zerocheck.report.console import new_console
from zerocheck.report.progress import (
    Detail,
    ProgressDisplay,
    duration,
    matrix,
    print_findings,
    print_outcome,
)
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally


def shown(
    records: list[Record], *, terminal: bool, plain_seconds: float = 10.0, detail: Detail = "normal"
) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, color_system=None, width=120, highlight=False,
        soft_wrap=True, _environ={"TERM": "xterm"},
    )  # fmt: skip
    progress = ProgressDisplay(console, plain_seconds=plain_seconds, detail=detail)
    for record in records:
        progress.handle(record)
    progress.close()
    progress.close()
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_final_matrix(terminal: bool) -> None:
    text = shown(failed(), terminal=terminal)
    assert "1 violated of 2" in text and "not judged" in text
    assert "VIOLATED zero2: the reduced gradient is 4 times too large" in text
    assert "zero2: 1 finding in 2 cases: 1 violated" in text
    assert "all obligations hold" not in text


def test_a_run_that_was_stopped_says_so_once() -> None:
    """And not that each obligation crashed."""
    crashed = finding(
        implementation="zero2",
        status="crashed",
        title="the ranks crashed: NameError",
        obligation=None,
        violation=None,
        place="build (a.py:5)",
        cases=2,
        left_out=46,
    )
    cases = [case(number, "zero2", "crashed") for number in range(2)]
    records = [started("zero2", planned=48), *cases, crashed, finished(1)]
    text = shown(records, terminal=False)
    assert text.endswith("zero2 --known-issues known.toml\n")
    line = (
        "zero2: stopped after 2 cases that crash alike at build (a.py:5), as the simplest case "
        "does (1 finding): 46 cases were not run"
    )
    assert text.count(line) == 1
    assert "ownership" not in text and "2 crashed" not in text and "not exercised" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_holds(terminal: bool) -> None:
    text = shown(held(), terminal=terminal)
    assert "2 hold" in text and "all obligations hold. 2 cases: 2 passed" in text


def test_what_is_unsupported_does_not_hold() -> None:
    refused = [case(number, "zero2", "unsupported", reason="no dtype") for number in (2, 3)]
    records = [started(planned=4), case(0), case(1), *refused, finished()]
    message = "all obligations hold. 4 cases: 2 passed, 2 unsupported"
    assert message in shown(records, terminal=False)


def test_plain_lines_in_between() -> None:
    text = shown(held(3), terminal=False, plain_seconds=0.0)
    assert text.startswith("3 cases planned for zero2 on 2, 3 ranks\n")
    assert "\n1 of 3 cases, " in text and " left\n" in text
    assert "\x1b" not in text
    assert "1 of 3 cases" not in shown(held(3), terminal=False)


def test_an_interrupted_run() -> None:
    text = shown([started(planned=9), case()], terminal=False)
    assert "all obligations hold" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_values_are_never_markup(terminal: bool) -> None:
    records = [
        started(HOSTILE),
        case(0, HOSTILE, "violated", gradient="violated"),
        hostile_finding(),
        finding(title="[/]", number=1),
        finished(1),
    ]
    text = shown(records, terminal=terminal)
    assert "[red]x[/red] <b>&" in text and "[/]" in text
    assert "\x1b[31m" not in text and "\x00" not in text


def test_a_finding_that_is_told_better_says_so() -> None:
    again = finding(title="the gradient is a local one", cases=3)
    records = [*failed()[:3], finding(), finding(cases=2), again, finished(1)]
    lines = shown(records, terminal=False).splitlines()
    first = "VIOLATED zero2: the reduced gradient is 4 times too large"
    better = "VIOLATED zero2: the gradient is a local one"
    assert lines[1:4] == [first, f"updated (3 failing cases): {better}", ""]
    assert lines[4] == better and first not in lines[4:]


@pytest.mark.parametrize("terminal", [True, False])
def test_known_and_stale_issues(terminal: bool) -> None:
    text = shown(known(), terminal=terminal)
    line = "KNOWN upstream divides by nothing (cases: zero2 1; reports/findings/a.md)\n"
    assert (
        0 < text.index("no new finding") < text.index(line)
        and "the reduced gradient is 4 times too large" not in text
    )
    whole = shown(known(), terminal=terminal, detail="verbose")
    assert "KNOWN zero2: the reduced gradient is 4 times too large\n  known       upstream" in whole
    assert line not in whole
    assert (
        "no new finding. 2 cases: 1 passed, 1 with known issues. 1 known issue reproduced (silent)"
        in text
    )
    assert "zero2: 3 cases left out: known hang zero2 / hung: ranks mix up" in text
    text = shown([*held()[:-1], stale(), finished(1)], terminal=terminal)
    assert "  to do       remove known.toml, entry 2" in text
    assert "all obligations hold" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_findings_and_the_verdict(terminal: bool) -> None:
    text = shown(failed(), terminal=terminal, detail="quiet", plain_seconds=0.0)
    assert text.startswith("VIOLATED zero2: the reduced gradient is 4 times too large\n")
    assert "zero2: 1 finding in 2 cases: 1 violated" in text
    for noise in ("1 violated of 2\n", "next:", "cases of", " left"):
        assert noise not in text
    assert shown(known(), terminal=terminal, detail="quiet").startswith(
        "no new finding. 2 cases: 1 passed, 1 with known issues. 1"
    )


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://no-color.org; a terminal gets no colours then, and has the same text."""
    plain = re.compile(r"\x1b\[3[0-9](;|m)")

    def printed() -> str:
        console = new_console(file=io.StringIO(), width=120, force_terminal=True)
        print_findings(console, tally(failed()))
        print_outcome(console, tally(failed()))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert plain.search(printed()) or "\x1b[1;31m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not plain.search(printed()) and "31m" not in printed()
    assert "VIOLATED zero2" in printed()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_word_of_the_matrix_is_broken(width: int) -> None:
    names = ("ddp", "zero-redundancy", "fsdp1-no-shard", "fsdp2", "zero1", "zero2", "zero3")
    cases = [case(number, name) for number, name in enumerate(names)]
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(matrix(tally([started(*names), *cases, finished()]), width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    words = text.split()
    assert all(name in words for name in names)
    assert words.count("hold") + words.count("holds") == len(names) * 7
    assert max(map(len, text.splitlines())) <= width


def test_durations() -> None:
    assert [duration(s) for s in (5, 300, 10_000)] == ["5 s", "about 5 min", "about 3 h"]


def test_a_long_wait_before_the_first_case_is_named() -> None:
    """Building takes minutes on many ranks; what ends sooner than the wait prints nothing."""
    texts = []
    for wait in (0.01, 60.0):
        console = Console(file=io.StringIO(), width=200)
        display = ProgressDisplay(console, plain_seconds=wait)
        display.begins("loading mine.py:f")
        display.begins("building mine.py:f on 64 ranks")
        time.sleep(0.2)
        display.close()
        assert isinstance(console.file, io.StringIO)
        texts.append(console.file.getvalue())
    assert "building mine.py:f on 64 ranks ...\n" in texts[0] and texts[1] == ""


@pytest.mark.parametrize(("detail", "said"), [("normal", True), ("quiet", False)])
def test_a_case_that_does_not_end_is_named(detail: Detail, said: bool) -> None:
    """An endless loop is ended after minutes; until then the run is not without a word."""
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(console, silent_seconds=0.1, detail=detail)
    first, second, *_ = failed()
    for record in (first, second):
        display.handle(record)
    time.sleep(0.7)  # said after 0.1, 0.2 and 0.4 s
    display.close()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert (text.count("none has ended for 0 s: a case that makes no progress") >= 2) == said
    time.sleep(0.5)
    assert console.file.getvalue() == text
