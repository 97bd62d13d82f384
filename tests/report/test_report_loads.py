"""The tables of loads, in every format that has them."""

from __future__ import annotations

import io
import json
import re

from hand_made import held, resumed
from rich.console import Console

from zerocheck.report import json_report, markdown
from zerocheck.report.loads import tried_lines
from zerocheck.report.progress import print_outcome
from zerocheck.run.records.tally import tally


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_has_the_table_of_the_run_and_of_each_implementation() -> None:
    text = markdown.render(tally(resumed()))
    section = text[text.index("## Loads") : text.index("## Coverage")]
    whole, zero2, ddp = re.split(r"(?m)^### ", section)
    rows = [cells(line) for line in whole.splitlines() if line.startswith("|")]
    assert rows[0] == ["ranks", "2", "5"]
    assert rows[2:] == [
        ["2", "–", "1 + 1 violated + 1 hung + 1 known"],
        ["3", "8 + 1 unsupported + 1 crashed", "–"],
    ]
    assert zero2.startswith("zero2\n") and "violated" not in zero2
    assert ddp.startswith("ddp\n") and "| 3 " in ddp
    assert (
        "- 3 writers killed: 1 gave the new checkpoint, 1 the older one; 1 crashed\n"
        "- 2 bits flipped: 1 refused, 1 loaded wrong; 1 violated"
    ) in whole


def test_json() -> None:
    data = json.loads(json_report.render(tally(resumed())))
    assert data["loads"]["by_world_size"] == [
        {"saved": 2, "loaded": 5, "verdicts": {"holds": 1, "violated": 1, "hung": 1, "known": 1}},
        {"saved": 3, "loaded": 2, "verdicts": {"holds": 8, "unsupported": 1, "crashed": 1}},
    ]
    assert data["implementations"]["zero2"]["loads"]["tried"] == {
        "killed": {"verdicts": {"holds": 2}, "gave": {"new": 1, "older": 1}},
        "flip": {"verdicts": {"holds": 1}, "gave": {"none": 1}},
    }


def test_console() -> None:
    file = io.StringIO()
    print_outcome(Console(file=file, color_system=None, width=120), tally(resumed()))
    text = file.getvalue()
    assert "Loads by world size: saved down, loaded across" in text
    assert re.search(r"(?m)^3 +8 +–$", text)
    assert "1 gave the new checkpoint, 1 the older one; 1 crashed" in text


def test_a_run_without_checkpoints_says_nothing_of_loads() -> None:
    file = io.StringIO()
    print_outcome(Console(file=file, color_system=None, width=120), tally(held()))
    assert "loaded across" not in file.getvalue()
    assert "## Loads" not in markdown.render(tally(held()))
    assert json.loads(json_report.render(tally(held())))["loads"]["by_world_size"] == []
    assert tried_lines(tally(held()).loads) == []
