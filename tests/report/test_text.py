"""How a finding reads."""

from __future__ import annotations

import msgspec
import pytest
from hand_made import HOSTILE, KNOWN, VIOLATION, finding, hostile_finding

from zerocheck.foreign_text import printable
from zerocheck.protocol.verdicts import Status
from zerocheck.report.text import cell_text
from zerocheck.run.records.finding_text import finding_text, replay_line
from zerocheck.run.records.tally import Cell


def test_a_finding() -> None:
    assert (
        finding_text(finding())
        == """\
VIOLATED zero2: the reduced gradient is 4 times too large
  obligation  gradient: the reduced gradient lies in the enclosure of the declared semantics
  what        the reduced gradient is not what the declared semantics say
  where       step 1, role gradient, rank 2
  tensors     blocks.0.up.weight, head.weight, head.bias and 1 more
  element     blocks.0.up.weight[3, 5]: observed 0.125, expected 0.03125, bound 3.1e-09, \
3e+07 times the bound
  wrong       96 of 128 elements
  cause       x W
  reproduced  2 of 2 times in fresh rank processes
  fingerprint zero2 / gradient / x W
  replay      zerocheck replay zerocheck-report/findings/zero2-gradient.json"""
    )


def test_the_usual_reason_of_one_cause_and_what_is_known_of_other_code() -> None:
    lines = finding_text(finding(causes=("not sharded",), similar=KNOWN)).splitlines()
    at = lines.index("  cause       not sharded")
    assert lines[at + 1 : at + 5] == [
        "  usual       The wrapper fell back to plain data parallelism.",
        f"  similar     known issue of zero2: {KNOWN.reason}",
        f"              {KNOWN.page}",
        f"              {KNOWN.link}",
    ]
    two = finding_text(finding(causes=("not sharded", "gradient zero")))
    assert "  usual " not in two
    assert "  usual " not in finding_text(finding(causes=("not sharded",), known=KNOWN))


def test_a_known_one_says_why_and_where_it_is_listed() -> None:
    lines = finding_text(finding(known=KNOWN, confirmed=0, tries=0)).splitlines()
    assert lines[:5] == [
        "KNOWN zero2: the reduced gradient is 4 times too large",
        "  known       upstream divides by nothing",
        "  link        https://example.org/7",
        "  page        reports/findings/a.md",
        "  listed in   known.toml, entry 2",
    ]
    assert not any("reproduced" in line for line in lines)


def test_how_often_it_was_reproduced() -> None:
    rare = finding_text(finding(confirmed=2, tries=5, otherwise={"holds": 2, "crashed": 1}))
    assert rare.startswith(
        "VIOLATED zero2: the reduced gradient is 4 times too large (intermittent: 2 of 5)\n"
    )
    assert (
        "  reproduced  intermittent: 2 of 5 times in fresh rank processes (otherwise: holds 2, "
        "crashed 1)\n              a race, or memory that is read before it is written\n"
    ) in rare
    never = finding_text(finding(confirmed=0, tries=5, otherwise={"holds": 5}))
    assert "  reproduced  seen once, 0 of 5 times in fresh rank processes (otherwise: hol" in never
    assert "a race" not in never  # the suspicion says what is behind it
    assert "intermittent" not in never
    often = finding_text(finding(confirmed=0, tries=5, cases=3))
    assert "seen in 3 cases, 0 of 5 times" in often


def test_the_state_before_the_first_step_and_a_mild_finding() -> None:
    violation = msgspec.structs.replace(VIOLATION, step=-1, ranks=(0, 1, 2, 3), mild=True)
    text = finding_text(finding(violation=violation))
    assert "where       before the first step, role gradient, ranks 0, 1, 2 and 1 more" in text
    assert "only what is reported is wrong; the parameters are right" in text


def test_causes_that_cannot_be_told_apart_are_all_named() -> None:
    assert "one of: x W; x GA (the cases" in finding_text(finding(causes=("x W", "x GA")))
    unknown = msgspec.structs.replace(VIOLATION, causes=())
    assert "no known bug explains it" in finding_text(finding(causes=(), violation=unknown))


def test_a_hang_says_where_each_rank_stood() -> None:
    text = finding_text(
        finding(
            status="hung",
            title="the ranks hung",
            obligation=None,
            violation=None,
            causes=(),
            reason="rank 0: all_reduce 7\nrank 1: broadcast 7",
        )
    )
    assert "  reason      rank 0: all_reduce 7\n              rank 1: broadcast 7" in text
    assert "cause" not in text


def test_the_replay_line_names_code_of_the_user_again() -> None:
    line = replay_line(finding(implementation="my dir/a.py:My", case_file="a b.json"))
    assert line == "zerocheck replay 'a b.json' --implementation 'my dir/a.py:My'"
    line = replay_line(finding(implementation="ds_config.json+norm-local", case_file="a.json"))
    assert line == "zerocheck replay a.json --implementation ds_config.json+norm-local"
    assert replay_line(finding(case_file="")) == ""


def test_nothing_hostile_is_printed() -> None:
    text = finding_text(hostile_finding())
    assert all(character.isprintable() or character == "\n" for character in text)
    text.encode("utf-8")
    assert printable("a\tb\nc\r\x1b\ud800") == "a\tb\nc\\r\\x1b\\ud800"
    assert "\x1b" in HOSTILE


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"holds": 46}, "46 hold"),
        ({"holds": 1}, "1 holds"),
        ({"holds": 43, "violated": 3}, "3 violated of 46"),
        ({"holds": 1, "violated": 2, "hung": 1}, "2 violated, 1 hung of 4"),
        ({"not exercised": 9}, "– not exercised"),
        ({}, "–"),
        ({"unsupported": 9}, "all 9 unsupported"),
        ({"unsupported": 9, "not exercised": 1}, "– not exercised"),
        ({"unsupported": 9, "holds": 2}, "2 hold"),
        ({"holds": 45, "known": 1}, "45 hold, 1 known"),
        ({"holds": 45, "known": 1, "violated": 2}, "2 violated, 1 known of 48"),
    ],
)
def test_cells(counts: dict[Status, int], text: str) -> None:
    cell = Cell()
    cell.counts.update(counts)
    assert cell_text(cell) == text
