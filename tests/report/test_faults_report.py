"""The kill matrix in every format, from records made by hand, some of them hostile."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from hand_made import HOSTILE
from hand_made_faults import DONE, started, tried
from rich.console import Console

from zerocheck.case.schema import Case
from zerocheck.report import faults_json, faults_markdown
from zerocheck.report.faults_progress import FaultsProgress
from zerocheck.report.write import MATRIX_FORMATS, write_matrix
from zerocheck.run.records.matrix_records import FaultsFinished, FaultShrunk, MatrixRecord
from zerocheck.run.records.matrix_summary import Share, Summary

ROWS = (
    tried("a"),
    tried("bb", causes=("gradient x W", "gradient doubled"), cases=4),
    tried("ccc", causes=("gradient / W",), cases=9, seconds=2.0),
    tried("dddd", true_causes=(), causes=(), caught_by="hung", expected=None,
          cases=1, unsupported=0),
    tried("eeeee", caught_by="", case=None, cases=100, causes=()),
    tried("ffffff", caught_by="update"),
)  # fmt: skip
RECORDS = (started("a", "bb", "ccc", "dddd", "eeeee", "ffffff"), *ROWS, DONE)


def test_what_it_adds_up_to() -> None:
    summary = Summary(RECORDS)
    assert summary.caught == Share(5, 6) and [r.fault for r in summary.escaped] == ["eeeee"]
    assert (summary.median_cases, summary.median_seconds) == (2, 0.5)
    assert summary.as_expected == Share(4, 5)
    assert summary.named == Share(3, 4) and summary.named_alone == Share(2, 4)
    assert [row.fault for row in summary.misnamed] == ["ccc"]
    first = {word: [row.fault for row in rows] for word, rows in summary.first_by.items()}
    assert first["gradient"] == ["a", "bb", "ccc"] and first["hung"] == ["dddd"]
    assert first["update"] == ["ffffff"] and first["buffers"] == []
    assert summary.exit_code == 1


def test_what_counts_as_the_true_cause() -> None:
    """A crash in one case hides it there; attribution may be silent, and may not be wrong."""
    said = {"expected": "gradient", "rubric": r"counts 2 times"}
    rows = [
        tried("first", **said, attributions=("it counts 2 times", "")),
        tried("further", **said, causes=(), other_causes=("gradient x W",), attributions=("",)),
        tried("parted", **said, causes=(), attributions=("",), parted="it counts 2 times"),
        tried("wrong", **said, causes=(), attributions=("it counts 2 times", "it is 0")),
        tried("refuted", **said, causes=(), attributions=("it counts 2 times",), parted="it is 0"),
    ]
    summary = Summary([started(*(row.fault for row in rows)), *rows, DONE])
    assert [row.fault for row in rows if row.named] == ["first"]
    assert [row.fault for row in rows if row.named_by_any] == ["first", "further"]
    assert [row.fault for row in rows if row.attributed] == ["first", "parted"]
    assert not any(row.attributed_always for row in rows)
    assert summary.named_by_any == Share(2, 5) and summary.explained == Share(3, 5)
    assert summary.attributed == Share(2, 5) and summary.attributed_always == Share(0, 5)


def test_a_cause_with_more_said_names_the_true_one() -> None:
    more = tried("a", causes=("gradient x W, elements in memory order",))
    assert more.named and not tried("a", causes=("gradient x W squared",)).named


def test_seconds_of_the_diagnosis() -> None:
    rows = [tried("a", diagnosis=0.5), tried("b", diagnosis=1.5), tried("c", caught_by="crashed")]
    summary = Summary([started("a", "b", "c"), *rows, DONE])
    assert summary.diagnosis == (1.0, 1.5)
    assert "takes 1 s in the median, at most 1.5" in faults_markdown.render(summary)
    assert Summary([started("c"), rows[2], DONE]).diagnosis is None


def test_rows_stand_in_the_order_of_the_catalogue() -> None:
    mixed = Summary([RECORDS[0], *reversed(ROWS), DONE])
    assert mixed.rows == Summary(RECORDS).rows


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ((started("a"), tried("a"), DONE), 0),
        ((started("a"), tried("a", caught_by=""), DONE), 1),
        ((started("a"), tried("a")), 130),
        ((started("a"), FaultsFinished(outcome="interrupted", exit_code=130, seconds=1.0)), 130),
    ],
)
def test_exit_codes(records: tuple[MatrixRecord, ...], code: int) -> None:
    assert Summary(records).exit_code == code


def test_what_cannot_act_in_the_users_code_has_not_escaped() -> None:
    idle = tried("b", caught_by="", cases=7, unsupported=7, case=None)
    mine = Summary([started("a", "b", implementation="my.py:Mine"), tried("a"), idle, DONE])
    assert mine.exit_code == 0 and mine.caught == Share(1, 1) and mine.without_effect == [idle]
    assert "Nothing to inject into" in faults_markdown.render(mine)
    ours = Summary([started("a", "b"), tried("a"), idle, DONE])
    assert ours.exit_code == 1 and ours.escaped == [idle]
    none = Summary([started("b", implementation="my.py:Mine"), idle, DONE])
    assert none.exit_code == 1


def test_markdown_says_it_all() -> None:
    text = faults_markdown.render(Summary(RECORDS))
    assert "- caught: 5 of 6 (83 %) faults" in text
    assert "**eeeee**: the sum is an average (100 cases)" in text
    rows = text.partition("## Faults")[2].splitlines()
    row = next(line for line in rows if line.startswith("| ccc"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "ccc", "zero1", "gradient", "9", "2", "gradient / W (it is: gradient x W)",
    ]  # fmt: skip
    assert "**gradient** (the reduced gradient lies in the enclosure" in text


def test_markdown_of_one_that_was_cut_short() -> None:
    text = faults_markdown.render(Summary(RECORDS[:3]))
    assert "**This matrix is not complete: 2 of 6 faults were tried.**" in text


def test_json_has_rows_and_summary() -> None:
    data = json.loads(faults_json.render(Summary(RECORDS)))
    assert data["summary"]["caught"] == {"count": 5, "of": 6}
    assert data["exit_code"] == 1 and data["outcome"] == "done"
    assert [row["fault"] for row in data["faults"]] == [row.fault for row in ROWS]
    assert data["faults"][1]["cause_named"] and not data["faults"][1]["cause_named_alone"]
    assert data["faults"][0]["case"]["seed"] == 1


def test_nothing_hostile_gets_through(tmp_path: Path) -> None:
    hostile = HOSTILE.replace("\ud800", "")  # what a journal cannot hold
    names = {"fault": hostile, "where": hostile, "parent": hostile, "summary": hostile}
    row = tried("x", **{**names, "title": hostile, "causes": (hostile,), "caught_by": ""})
    records = [started(hostile, implementation=hostile), row, DONE]
    files = write_matrix(records, tmp_path)
    assert [path.name for path in files] == list(MATRIX_FORMATS)
    text = (tmp_path / "faults.md").read_text(encoding="utf-8")
    assert "<b>" not in text and "\x1b" not in text and "\u202e" not in text
    json.loads((tmp_path / "faults.json").read_text(encoding="utf-8"))


def test_progress_has_a_line_for_each() -> None:
    into = StringIO()
    progress = FaultsProgress(Console(file=into, width=200, highlight=False))
    for record in RECORDS:
        progress.handle(record)
    message = into.getvalue()
    assert "6 faults, profile ci" in message
    assert "1/6 a: gradient, 2 cases, 0.5 s, cause gradient x W" in message
    assert "5/6 eeeee: ESCAPED, 100 cases" in message and "escaped: eeeee" in message
    assert "it takes 2 cases and 0.5 s in the median" in message


def test_smallest_cases_stand_in_every_format() -> None:
    small = FaultShrunk(fault="a", case=Case(), size="2 ranks, no blocks, 1 step", tries=5)
    large = FaultShrunk(fault="bb", case=Case(mesh=(5,)), size="5 ranks, no blocks, 1 step")
    summary = Summary([*RECORDS[:-1], small, large, FaultShrunk(fault="ccc"), DONE])
    assert summary.small["at most 3 ranks"] == Share(1, 2)
    page = faults_markdown.render(summary)
    assert " smallest case " in page and "| 5 ranks, no blocks, 1 step |" in page
    assert page.count("| not found ") == 1
    assert "at most 3 ranks in 1 of 2 (50 %)" in page
    data = json.loads(faults_json.render(summary))
    assert [one["fault"] for one in data["shrunk"]] == ["a", "bb", "ccc"]
    assert data["summary"]["small"]["2 steps"] == {"count": 2, "of": 2}
    assert " smallest case " not in faults_markdown.render(Summary(RECORDS))
    console = Console(file=StringIO(), width=200)
    progress = FaultsProgress(console)
    for record in (*RECORDS[:-1], small, DONE):
        progress.handle(record)
    assert "a: smallest case 2 ranks, no blocks, 1 step" in console.file.getvalue()  # type: ignore[attr-defined]
