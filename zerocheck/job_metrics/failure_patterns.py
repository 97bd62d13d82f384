"""Failure patterns of sharded training, in words, with the figures that show them.

No verdict depends on them. Two limits are conventions and no derived bounds: what takes most of a
whole takes more than half of it, and what is worth a look takes a tenth. The figures stand in every
record, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..sizes import binary
from .records import CheckpointTime, CollectiveFigures, ModelSize, TimedStep
from .timed_step import middle_of

MOST = 0.5
NOTABLE = 0.1
SMALL = 1 << 20
"""Bytes: the first bucket of torch's DDP, the smallest message that it makes up on purpose."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
"""Kinds of collectives that reduce gradients."""
STEPS = 3
"""Timed steps before anything is said."""


@dataclass(frozen=True)
class JobFigures:
    """Figures of a job in which patterns are looked for.

    timed: the last steps that were timed; saves: of checkpoints; elapsed: seconds of the job.
    """

    size: ModelSize
    timed: Sequence[TimedStep] = ()
    saves: Sequence[CheckpointTime] = ()
    elapsed: float = 0.0


class FoundPattern(NamedTuple):
    """A pattern, and the sentence that shows it."""

    name: str
    text: str


def failure_patterns(figures: JobFigures) -> Iterator[FoundPattern]:
    """Yield the patterns that the figures show."""
    names = (_OF_STEPS if len(figures.timed) >= STEPS else {}) | _OF_CHECKPOINTS
    for name, look in names.items():
        text = look(figures)
        if text:
            yield FoundPattern(name, text)


def _small_collectives(figures: JobFigures) -> str:
    """Each layer, or each tensor, is reduced or gathered in a call of its own, and it is small.

    A layer is gathered twice in a microbatch, for the forward and for the backward, but the root's,
    which FSDP keeps from one to the other.
    """
    step, layers = figures.timed[-1], figures.size.layers
    microbatches = max(1, step.microbatches)
    for kind in _kinds(step, *REDUCING, "all_gather"):
        fewest = microbatches * (2 * layers - 1 if kind.kind == "all_gather" else layers)
        if layers > 1 and kind.calls >= fewest and kind.bytes < SMALL:
            share = "" if kind.waited is None else f" and {kind.waited:.0%} of its time"
            return (
                f"{kind.calls:g} calls of {kind.kind} in a step{share}, of {_bytes(kind.bytes)} "
                f"each (median), for {layers} layers: larger buckets or units, such as whole "
                "blocks, need fewer"
            )
    return ""


def _large_units(figures: JobFigures) -> str:
    """A gathered unit of several layers is larger than all that the rank keeps."""
    step, size = figures.timed[-1], figures.size
    largest = _largest(step, "all_gather")
    if not size.sharded or not size.largest < largest < size.gathered:
        return ""
    kept = max(one.parameters + one.gradients + one.states for one in step.memory)
    if largest <= kept:
        return ""
    return (
        f"the largest unit is gathered into {_bytes(largest)}, and a rank keeps {_bytes(kept)} of "
        "parameters, gradients and optimizer states; its largest layer has "
        f"{_bytes(size.largest)}: wrap it in smaller units"
    )


def _all_gathered(figures: JobFigures) -> str:
    """One all-gather has all parameters of a sharded model of several layers."""
    step, size = figures.timed[-1], figures.size
    largest = _largest(step, "all_gather")
    if not size.sharded or size.layers < 2 or largest < size.gathered:
        return ""
    return (
        f"one all-gather has all {_bytes(largest)} of the parameters, of {size.layers} layers: "
        "while they are there a rank holds what it would unsharded; make each block a unit of its "
        "own"
    )


def _activations(figures: JobFigures) -> str:
    """Activations take most of the memory that is accounted for."""
    one = max(figures.timed[-1].memory, key=lambda memory: memory.activations or 0)
    kept = one.parameters + one.gradients + one.states
    if one.activations is None or one.activations <= kept:
        return ""
    return (
        f"activations take {_bytes(one.activations)} when a backward begins, parameters, gradients "
        f"and optimizer states {_bytes(kept)}: more sharding saves little of it; activation "
        "checkpointing, smaller microbatches or shorter sequences do"
    )


def _offload(figures: JobFigures) -> str:
    """Copies between devices, and an optimizer on the CPU, take a notable part of the step."""
    copied = _middle(figures, lambda step: step.copied) or 0.0
    update = _middle(figures, lambda step: step.update) or 0.0
    on_cpu = update if figures.size.offloaded else 0.0
    if copied + on_cpu < NOTABLE:
        return ""
    text = f"copies between devices take {copied:.0%} of the step"
    if on_cpu:
        text += f" and the optimizer on the CPU {on_cpu:.0%}"
    return f"{text}, in which the accelerator waits: offload less, or on fewer steps"


def _slow_rank(figures: JobFigures) -> str:
    """The others wait for the same rank in every timed step."""
    idle = [step.idle for step in figures.timed if len(step.idle) > 1]
    late = {min(range(len(one)), key=one.__getitem__) for one in idle}
    if len(idle) < STEPS or len(late) > 1:
        return ""
    (rank,) = late
    others = median(sum(one[:rank] + one[rank + 1 :]) / (len(one) - 1) - one[rank] for one in idle)
    if others < NOTABLE:
        return ""
    return (
        f"rank {rank} comes last in each of {len(idle)} timed steps: the others wait for it "
        f"{others:.0%} of the step"
    )


def _slow_link(figures: JobFigures) -> str:
    """Most of the step is waited in collectives while all ranks are there."""
    link = _middle(figures, lambda step: step.link)
    if link is None or link <= MOST:
        return ""
    step = figures.timed[-1]
    sent = sum(kind.calls * kind.bytes for kind in step.collectives)
    return (
        f"{link:.0%} of the step is waited in collectives while all ranks are there, for "
        f"{_bytes(sent)}: the link or its backend is what is slow"
    )


def _slow_checkpoints(figures: JobFigures) -> str:
    """Saves take a notable part of the time."""
    seconds = [one.seconds for one in figures.saves]
    if len(seconds) < 2 or sum(seconds) < NOTABLE * figures.elapsed:
        return ""
    return (
        f"{len(seconds)} saves of {median(seconds):.3g} s (median) take "
        f"{sum(seconds) / figures.elapsed:.0%} of the time: save less often, each rank its shards, "
        "or asynchronously"
    )


def _fragile_checkpoints(figures: JobFigures) -> str:
    """A save wrote over the checkpoint before it."""
    replaced = [one for one in figures.saves if one.replaced]
    if not replaced:
        return ""
    return (
        f"{len(replaced)} of {len(figures.saves)} saves wrote over an older checkpoint in "
        f"{replaced[0].folder}: a job that dies in such a save has neither; save into a new folder"
    )


_Look = Callable[[JobFigures], str]
_OF_STEPS: dict[str, _Look] = {
    "many small collectives": _small_collectives,
    "units are too large": _large_units,
    "everything is gathered at once": _all_gathered,
    "activations dominate": _activations,
    "offload starves the accelerator": _offload,
    "a slow rank": _slow_rank,
    "a slow link": _slow_link,
}
_OF_CHECKPOINTS: dict[str, _Look] = {
    "slow checkpoints": _slow_checkpoints,
    "fragile checkpoints": _fragile_checkpoints,
}
PATTERNS = (*_OF_STEPS, *_OF_CHECKPOINTS)
"""Names of all patterns."""


def _kinds(step: TimedStep, *names: str) -> list[CollectiveFigures]:
    return [kind for kind in step.collectives if kind.kind in names]


def _largest(step: TimedStep, kind: str) -> int:
    return max((one.largest for one in _kinds(step, kind)), default=0)


def _middle(figures: JobFigures, of: Callable[[TimedStep], float | None]) -> float | None:
    return middle_of(of(step) for step in figures.timed)


def _bytes(size: float) -> str:
    return binary(round(size))
