"""Bytes and communication in every format, from records made by hand."""

from __future__ import annotations

import io
import json

import msgspec
from hand_made import case, finished, started
from rich.console import Console

from zerocheck.protocol.verdicts import MeasuredBytes
from zerocheck.report import json_report, markdown
from zerocheck.report.progress import ProgressDisplay
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import CaseFinished, Record
from zerocheck.run.records.tally import tally

FSDP2 = MeasuredBytes(
    copy=(4000, 4000, 8000),
    held=4120,
    total=16400,
    sent=9000.0,
    trained=4000,
    elements=1000,
    stage=3,
    predicted=True,
)


def measured(
    number: int,
    measured_bytes: MeasuredBytes,
    name: str = "fsdp2",
    *,
    ranks: int = 4,
    microbatches: int = 1,
) -> CaseFinished:
    one = case(number, name, mesh=(ranks,))
    assert one.judgement is not None
    training = msgspec.structs.replace(one.case.training, microbatches=microbatches)
    return msgspec.structs.replace(
        one,
        case=msgspec.structs.replace(one.case, training=training),
        judgement=msgspec.structs.replace(one.judgement, measured_bytes=measured_bytes),
    )


def changed(**other: object) -> MeasuredBytes:
    return msgspec.structs.replace(FSDP2, **other)


def records() -> list[Record]:
    small = changed(copy=(400, 400, 800), held=800, total=1600, trained=400, elements=100)
    many = changed(elements=5000)
    unsaid = changed(stage=None, predicted=False, held=8800, total=35200, sent=6000.0)
    return [
        started("fsdp2", "mine"),
        measured(0, small),
        measured(1, FSDP2),
        measured(2, many, microbatches=2),
        measured(3, changed(held=16000, total=16000, sent=0.0), ranks=1),
        measured(6, small, ranks=8),
        measured(4, unsaid, "mine"),
        case(5, "mine", "unsupported", reason="no"),
        finished(0),
    ]


def message() -> str:
    console = Console(file=io.StringIO(), width=200)
    progress = ProgressDisplay(console)
    for record in records():
        progress.handle(record)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_console_says_one_line_for_each_implementation() -> None:
    text = message()
    assert (
        "fsdp2, 4 ranks: 1.03 times 16 Psi/N (1,000 elements); redundancy 1.02; "
        "3.00 Psi sent (paper: 3)\n"
    ) in text
    # 8,800 bytes are 0.88 times the 10,000 of stage 1, and 1.26 times the 7,000 of stage 2.
    assert "mine, 4 ranks: 0.88 times 8 Psi + 8 Psi/N, the nearest (1,000 elements)" in text
    assert "2.00 Psi sent (paper: 2); no layout, so the ratio alone\n" in text


def test_markdown_has_a_row_for_each_number_of_ranks() -> None:
    text = markdown.render(tally(records()))
    assert "## Memory and communication" in text and "padding" in text
    rows = [line for line in text.splitlines() if line.startswith(("| fsdp2", "| mine"))]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    one = "fsdp2 1 1,000 16,000 16 Psi/N 1.00 1.00 to 1.00 1.00 – 3"
    four = "fsdp2 4 1,000 4,120 16 Psi/N 1.03 1.03 to 2.00 1.02 3.00 3"
    assert [" ".join(row) for row in cells if "1,000" in row][:2] == [one, four]


def test_json_has_bytes_and_ratios() -> None:
    data = json.loads(json_report.render(tally(records())))
    one, four, _ = data["implementations"]["fsdp2"]["memory"]
    assert (one["world_size"], four["world_size"]) == (1, 4)
    assert (four["held"], four["ideal"], four["ratio"]) == (4120, 4000, 1.03)
    assert (four["cases"], four["ratios"], four["sent_psi"]) == (3, [1.03, 2.0], 3.0)
    (mine,) = data["implementations"]["mine"]["memory"]
    assert not mine["declared"] and not mine["layout"] and mine["stage"] == 1


def test_without_memory_nothing_is_said_and_journals_stay_small() -> None:
    counted = tally([started(), case(), finished()])
    assert "## Memory and communication" not in markdown.render(counted)
    assert json.loads(json_report.render(counted))["implementations"]["zero2"]["memory"] == []
    assert len(encode(measured(0, FSDP2))) - len(encode(case(0, "fsdp2", mesh=(4,)))) < 200
