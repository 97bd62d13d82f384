"""Whether it fits, where it runs out, and that what is suggested fits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from slices import WHOLE, sliced

from zerocheck.cli import main
from zerocheck.memory.advice import advise
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source
from zerocheck.memory.text import asked, render
from zerocheck.memory.verdict import CUDA_CONTEXT, MemoryVerdict, Reserved, judge_memory, words_of

GIB = 2**30
PAGE = Path(__file__).parents[2] / "reports" / "memory" / "13b-on-8-ranks-of-40-gib.md"


@pytest.mark.long
def test_13b_on_8_ranks_of_40_gib() -> None:
    """Llama 13B, FSDP2 (stage 3), 4 x 2048 positions: what the page suggests fits, as it says."""
    run_out, fits = published()
    command, *_ = (
        line.removeprefix("    ") for line in run_out if line.startswith("    zerocheck")
    )
    words = shlex.split(command)
    followed = CliRunner().invoke(main, [*words[1:], "--device-memory", "40GiB"])
    assert followed.exit_code == 0, followed.output
    assert "it fits into 40.000 GiB" in followed.output
    assert fits and set(fits) <= {"...", *followed.output.splitlines()}
    if WHOLE:
        _runs_out(run_out, command)


def _runs_out(published: Sequence[str], suggested: str) -> None:
    """Its activations are too many, and that is the page. Half a minute of processor time."""
    setup = Setup(model="llama-13b", implementation="fsdp2", world_size=8, batch=4, sequence=2048)
    report = analyse(setup, limit=40 * GIB)
    assert report.exit_code == 1 and report.device is not None
    over = report.device.over
    assert over is not None and over.phase == "forward" and over.module.startswith("blocks.")
    assert over.total > 40 * GIB >= over.total - over.asked
    assert over.bytes["activation"] > sum(over.bytes.values()) / 2
    assert report.device.asks is None  # no stage helps against activations
    assert suggested == next(one.command for one in report.device.tried if one.fits)
    message = render(report)
    assert suggested in message and set(published) <= {"...", *message.splitlines()}


def published() -> list[list[str]]:
    """The lines of each output on the page of this case."""
    blocks = PAGE.read_text(encoding="utf-8").split("```")[1::2]
    return [block.splitlines()[1:] for block in blocks]


def small(name: str, **more: object) -> Setup:
    options = {"world_size": 4, "batch": 4, "sequence": 31, "precision": "fp32", **more}
    return Setup(model="small_models:small", implementation=name, **options)  # type: ignore[arg-type]


def test_the_byte_that_is_missing() -> None:
    """Of what is reserved: a device with room for the peak alone is too small."""
    setup = small("fsdp2")
    line = run(setup, source(setup.model)).timeline
    peak = line.peak()
    assert line.first_over(peak.total) is None
    assert line.first_over(peak.total - 1) == peak
    held = analyse(setup).reserved
    assert held is not None and peak.total < held.allocated < held.default
    needed = min(held.default, held.expandable)
    for size, code in ((needed, 0), (needed - 1, 1), (peak.total, 1)):
        report = analyse(setup, limit=CUDA_CONTEXT + size)
        assert report.exit_code == code and report.device is not None
        assert report.device.over is None and bool(report.device.tried) == bool(code)
    message = render(report)
    assert "it does not fit into" in message and "the caching allocator reserves" in message


@pytest.mark.parametrize(
    ("reserved", "fits", "words"),
    [
        ((9, 8), True, "it fits into 10.750 GiB: the caching allocator reserves 9.000 GiB"),
        ((11, 10), True, "only with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ((12, 11), False, "reserves 12.000 GiB, and 11.000 GiB with expandable segments"),
        (None, True, "by its peak of 7.000 GiB; what the allocator reserves is not known (why)"),
    ],
)
def test_the_verdict_is_of_what_is_reserved(
    reserved: tuple[int, int] | None, fits: bool, words: str
) -> None:
    held = None
    if reserved is not None:
        default, expandable = (size * GIB for size in reserved)
        held = Reserved(
            allocated=8 * GIB, default=default, expandable=expandable, building=13 * GIB
        )
    found = judge_memory(10 * GIB + CUDA_CONTEXT, 7 * GIB, held, "why")
    said = " ".join(words_of(found))
    assert found.fits == fits and words in said
    assert "0.75 GiB of CUDA context, as measured on an H100; not counted: buffers of NCCL" in said
    building = "building the whole model on the device would not fit: 13.000 GiB"
    assert (building in said) == (fits and held is not None)
    assert not judge_memory(10 * GIB, 10 * GIB, None).fits  # its context has no room


@pytest.mark.long
def test_everything_that_is_said_to_fit_fits() -> None:
    setup = small("ddp", batch=128)
    held = analyse(setup).reserved
    assert held is not None
    limit = CUDA_CONTEXT + min(held.default, held.expandable) - 1
    report = analyse(setup, limit=limit)
    assert report.exit_code == 1 and report.device is not None
    fitting = [one for one in report.device.tried if one.fits]
    assert fitting
    for one in sliced(report.device.tried, (fitting[0], report.device.tried[0])):
        result = CliRunner().invoke(
            main, [*shlex.split(one.command)[1:], "--device-memory", f"{limit}B"]
        )
        assert result.exit_code == (0 if one.fits else 1), one.command


@pytest.mark.long
def test_which_stage_is_asked_for() -> None:
    """Each limit lies between what two stages need."""
    setup = small("ddp")
    found = analyse(setup, limit=10**12)
    assert found.device is not None and found.device.over is None
    assert "stage 0 (DDP) will do" in asked(found.device)
    stages = found.device.stages
    assert stages[0] > stages[1] > stages[2] > stages[3]
    asks = ((2, "gradients"), (1, "optimizer states"), (3, "parameters"))
    for stage, words in sliced(asks, asks[:1]):
        device = analyse(setup, limit=CUDA_CONTEXT + stages[stage]).device
        assert device is not None and device.asks == stage and words in asked(device)


def test_one_change_at_a_time_and_then_together() -> None:
    """Nothing but stage 3 with checkpointing and a microbatch of 1 fits; no simulation needed."""
    setup = small("zero1", world_size=1024)

    def judge(other: Setup) -> MemoryVerdict:
        good = other.stage == 3, other.checkpoint, other.batch == 1
        return judge_memory(CUDA_CONTEXT + 7, 10 - sum(good), None)

    tried = tuple(advise(setup, judge))
    assert [one.fits for one in tried] == [False] * (len(tried) - 1) + [True]
    assert tried[-1].change == "stage 3 (fsdp2) + activation checkpointing + a microbatch of 1"
    assert "--checkpoint-activations" in tried[-1].command and "--batch 1" in tried[-1].command


def test_the_smallest_change_that_is_enough() -> None:
    setup = small("fsdp2", batch=16)
    tried = tuple(advise(setup, lambda other: judge_memory(CUDA_CONTEXT + 8, other.batch, None)))
    (batch,) = [one for one in tried if one.fits]
    assert batch.change == "a microbatch of 8"
    again = replace(setup, batch=8)
    assert batch.command == again.command()
