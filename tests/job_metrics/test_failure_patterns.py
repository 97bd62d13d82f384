"""Each pattern, with figures made by hand: those that show it, and those that just do not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hand_made_figures import MEMORY, MIB, SIZE, STEP

from zerocheck.job_metrics.failure_patterns import PATTERNS, STEPS, JobFigures, failure_patterns
from zerocheck.job_metrics.records import CheckpointTime, CollectiveFigures, RankMemory, TimedStep

SAVE = CheckpointTime(step=1, what="save", folder="checkpoints/1", seconds=1.0)
RIGHT = JobFigures(SIZE, (STEP,) * STEPS, (SAVE,) * 3, 100.0)


def with_step(count: int = STEPS, /, **given: object) -> JobFigures:
    return JobFigures(SIZE, (msgspec.structs.replace(STEP, **given),) * count, (SAVE,), 100.0)


def sized(step: TimedStep = STEP, /, **given: object) -> JobFigures:
    return JobFigures(msgspec.structs.replace(SIZE, **given), (step,) * STEPS, (), 100.0)


def calls(kind: str, count: float, size: int, largest: int | None = None) -> dict[str, object]:
    one = CollectiveFigures(kind=kind, calls=count, bytes=size, largest=largest or size, waited=0.1)
    return {"collectives": (one,)}


def memory(**given: int) -> dict[str, object]:
    return {"memory": (MEMORY, msgspec.structs.replace(MEMORY, **given))}


def saves(*found: CheckpointTime, elapsed: float = 100.0) -> JobFigures:
    return JobFigures(SIZE, (), found, elapsed)


def save(**given: object) -> CheckpointTime:
    return msgspec.structs.replace(SAVE, **given)


# pattern: (figures that show it, words of the sentence), figures that do not
SHOWN: dict[str, list[tuple[JobFigures, str]]] = {
    "many small collectives": [
        (with_step(**calls("all_reduce", 10, MIB - 1)), "10 calls of all_reduce in a step and 10%"),
        (with_step(**calls("all_gather", 19, 4096)), "of 4.000 KiB each (median), for 10 layers"),
        (with_step(microbatches=2, **calls("reduce_scatter", 20, 9)), "20 calls of reduce_scatter"),
    ],
    "units are too large": [
        (
            with_step(memory=(RankMemory(parameters=MIB, gradients=MIB, states=MIB),) * 2),
            "gathered into 16.000 MiB, and a rank keeps 3.000 MiB",
        )
    ],
    "everything is gathered at once": [
        (with_step(**calls("all_gather", 1, 100 * MIB)), "one all-gather has all 100.000 MiB")
    ],
    "activations dominate": [
        (with_step(**memory(activations=101 * MIB)), "activations take 101.000 MiB when a backward")
    ],
    "offload starves the accelerator": [
        (with_step(copied=0.1), "copies between devices take 10% of the step, in which"),
        (sized(offloaded=True), "take 0% of the step and the optimizer on the CPU 20%"),
    ],
    "a slow rank": [
        (with_step(idle=(0.2, 0.15, 0.02, 0.15)), "rank 2 comes last in each of 3 timed steps")
    ],
    "a slow link": [(with_step(link=0.51), "51% of the step is waited in collectives while all")],
    "slow checkpoints": [
        (saves(SAVE, save(seconds=9.0)), "2 saves of 5 s (median) take 10% of the time")
    ],
    "fragile checkpoints": [
        (saves(SAVE, save(replaced=True)), "1 of 2 saves wrote over an older checkpoint in check")
    ],
}
NOT_SHOWN: dict[str, list[JobFigures]] = {
    "many small collectives": [
        with_step(**calls("all_reduce", 9, 4)),
        with_step(**calls("all_reduce", 10, MIB)),
        with_step(microbatches=2, **calls("all_gather", 37, 4096)),
        sized(msgspec.structs.replace(STEP, **calls("all_reduce", 5, 4)), layers=1),  # type: ignore[arg-type]
    ],
    "units are too large": [
        with_step(memory=(RankMemory(parameters=16 * MIB),)),
        # One layer that no wrapping splits.
        with_step(memory=(RankMemory(),), **calls("all_gather", 9, 8 * MIB)),
    ],
    "everything is gathered at once": [
        with_step(**calls("all_gather", 1, 100 * MIB - 1)),
        # What a ZeRO-1 optimizer does after its step.
        sized(msgspec.structs.replace(STEP, **calls("all_gather", 1, 100 * MIB)), sharded=False),  # type: ignore[arg-type]
    ],
    "activations dominate": [with_step(**memory(activations=100 * MIB))],
    "offload starves the accelerator": [with_step(copied=0.09), with_step(update=0.9)],
    "a slow rank": [
        with_step(idle=(0.11, 0.11, 0.02, 0.11)),
        with_step(idle=()),
        JobFigures(
            SIZE,
            tuple(msgspec.structs.replace(STEP, idle=one) for one in ((0.4, 0.0), (0.0, 0.4)) * 2),
        ),
    ],
    "a slow link": [with_step(link=0.5), with_step(link=None)],
    "slow checkpoints": [saves(save(seconds=90.0)), saves(SAVE, save(seconds=8.9))],
    "fragile checkpoints": [saves(SAVE, SAVE)],
}


def names(figures: JobFigures) -> dict[str, str]:
    return {one.name: one.text for one in failure_patterns(figures)}


def test_a_right_job_shows_none() -> None:
    assert names(RIGHT) == {}
    assert set(PATTERNS) == set(SHOWN) == set(NOT_SHOWN)


def each(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, row, id=f"{name}-{at}")
        for name, rows in table.items()
        for at, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("name", "row"), each(SHOWN))
def test_what_shows_it(name: str, row: tuple[JobFigures, str]) -> None:
    figures, words = row
    found = names(figures)
    assert [*found] == [name] and words in found[name]


@pytest.mark.parametrize(("name", "figures"), each(NOT_SHOWN))
def test_what_does_not(name: str, figures: JobFigures) -> None:
    assert name not in names(figures)


def test_nothing_is_said_of_two_steps() -> None:
    assert names(with_step(STEPS - 1, link=0.9)) == {}
