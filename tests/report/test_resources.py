"""Peak memory and checkpoint times in every format, from records made by hand."""

from __future__ import annotations

import json

from hand_made import case, finished, started
from msgspec.structs import replace

from zerocheck.report import html, json_report, markdown
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally


def records() -> list[Record]:
    measured = replace(
        case(0, "fsdp2", mesh=(2,)),
        save_seconds=(0.5, 0.25),
        load_seconds=(0.125,),
        peak_bytes=4096,
    )
    return [
        started("fsdp2", "zero2"),
        measured,
        replace(case(1, "fsdp2", mesh=(2,)), peak_bytes=1024),
        case(2, "zero2"),
        finished(0),
    ]


def test_markdown_has_a_row_for_each_implementation() -> None:
    text = markdown.render(tally(records()))
    part = text[text.index("## Peak memory") : text.index("## Declared semantics")]
    rows = [line for line in part.splitlines() if line.startswith("| fsdp2")]
    cells = [" ".join(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert cells == ["fsdp2 2 2 2,560 4,096", "fsdp2 2 0.375 1 0.125"]
    assert "## Checkpoint times" in part and "zero2" not in part
    plain = markdown.render(tally([started(), case(), finished()]))
    assert "## Peak memory" not in plain and "## Checkpoint times" not in plain


def test_the_page_has_both_tables() -> None:
    page = html.render(tally(records()))
    assert '<section id="checkpoint-times"' in page and 'href="#checkpoint-times"' in page
    assert "<td>2,560</td>" in page and "<td>0.375</td>" in page
    assert "checkpoint-times" not in html.render(tally([started(), case(), finished()]))


def test_json_has_all_figures() -> None:
    data = json.loads(json_report.render(tally(records())))
    metrics = data["implementations"]["fsdp2"]["metrics"]
    assert metrics["save_seconds"] == {"count": 2, "median": 0.375}
    assert metrics["measured_peaks"] == [
        {"world_size": 2, "cases": 2, "median": 2560, "most": 4096}
    ]
    empty = data["implementations"]["zero2"]["metrics"]
    assert empty["measured_peaks"] == []
    assert empty["load_seconds"] == {"count": 0, "median": None}
