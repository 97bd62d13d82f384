"""Bytes and communication in every format, from records made by hand."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from hand_made import case, finished, started
from rich.console import Console

from zerocheck.case.schema import Precision
from zerocheck.protocol.verdicts import MeasuredBytes
from zerocheck.report import html, json_report, markdown
from zerocheck.report.communication import differences
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
    one = "fsdp2 1 1,000 16,000 16 Psi/N 1.00 1.00 to 1.00 1.00 – 3 –"
    four = "fsdp2 4 1,000 4,120 16 Psi/N 1.03 1.03 to 2.00 1.02 3.00 3 –"
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


def in_units(**psi: float) -> MeasuredBytes:
    """What a rank of four sends of 4,000 trained bytes, by kind, in units of Psi (N - 1) / N."""
    by_kind = {kind: 3000.0 * units for kind, units in psi.items()}
    return changed(sent=sum(by_kind.values()), by_kind=by_kind)


def differences_of(*cases: CaseFinished) -> list[str]:
    counted = tally([started("fsdp2"), *cases, finished(0)])
    return differences(counted.implementations["fsdp2"].weights[4])


ROOT = "is not gathered again: the root unit, and units that do not reshard"


@pytest.mark.parametrize(
    ("stage", "microbatches", "psi", "said"),
    [
        (3, 1, {"reduce_scatter": 1, "all_gather": 2}, []),
        (3, 1, {"reduce_scatter": 1, "all_gather": 1.25}, [f"0.75 {ROOT}"]),
        (
            3, 2, {"reduce_scatter": 2, "all_gather": 3.5},
            ["each of 2 microbatches reduces its gradients: 2.00", f"0.50 {ROOT}"],
        ),
        (
            2, 1, {"reduce_scatter": 1.1, "all_gather": 1.1, "all_reduce": 0.02},
            ["reductions send 1.10, more than 1 by padding", "gathers send 1.10, more than 1",
             "all-reduces of norms, flags and buffers send 0.02"],
        ),
        (0, 1, {"all_reduce": 2}, []),
        (0, 1, {"all_reduce": 2.05}, ["more than 2 by norms, flags and buffers"]),
        (
            1, 1, {"all_reduce": 2, "broadcast": 1},
            ["all-reduces give every rank the whole gradients", "from their owners or of buffers"],
        ),
    ],
)  # fmt: skip
def test_each_part_that_is_not_as_in_the_paper_is_explained(
    stage: int, microbatches: int, psi: dict[str, float], said: list[str]
) -> None:
    one = msgspec.structs.replace(in_units(**psi), stage=stage)
    found = differences_of(measured(0, one, microbatches=microbatches))
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def test_the_median_case_is_explained_and_lowered_precision_is_said() -> None:
    few, some, most = (in_units(reduce_scatter=1, all_gather=n) for n in (1.0, 1.5, 1.75))
    assert differences_of(*(measured(n, one) for n, one in enumerate((most, few, some)))) == [
        f"0.50 {ROOT}, stay gathered for the backward"
    ]
    lowered = measured(0, in_units(reduce_scatter=0.5, all_gather=1))
    precision = Precision(compute="bf16", reduce="bf16")
    lowered = msgspec.structs.replace(
        lowered, case=msgspec.structs.replace(lowered.case, precision=precision)
    )
    assert differences_of(lowered) == [
        "gradients travel in bf16, half the bytes of fp32",
        "parameters may travel in bf16, half the bytes of fp32",
    ]


def test_a_page_explains_them_too() -> None:
    one = measured(0, in_units(reduce_scatter=1, all_gather=1.25))
    text = html.render(tally([started("fsdp2"), one, finished(0)]))
    assert f"<td>0.75 {ROOT}, stay gathered for the backward</td>" in text
