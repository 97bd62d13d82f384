"""Extrapolation from a model with a few blocks: the events of a block in the middle repeat.

A timeline is split where the block changes. The parts that belong to no block must have as many
events for every number of blocks, with bytes that grow by a constant (an optimizer's kernel over
all parameters). The parts that go through the blocks, up or down, must have the very same events in
every block but the outermost EDGE ones, whose events must not depend on the number of blocks. That
is demanded of three timelines, with k, k + 1 and k + 2 blocks. Then with each block more, the same
events are put in at the same places, so the timeline with L blocks is known, event by event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .timeline import AllocatingOperator, Timeline

EDGE = 2
"""Blocks at each end that may differ: they prefetch into, or from, what is no block."""
FEWEST = 2 * EDGE + 1
TRIED = (FEWEST, FEWEST + 1, FEWEST + 2)
"""Numbers of blocks that are simulated."""


class NotUniform(Exception):
    """Error for timelines that do not grow by equal blocks; the message says where."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Events outside of blocks (`sweep` 0), or of all blocks, first to last (1) or back (-1).

    runs: one list of events, or one for each block in the order of time.
    """

    sweep: int
    runs: list[list[AllocatingOperator]]


def refuse_early(few: Timeline, more: Timeline) -> None:
    """Raise NotUniform where the first two timelines, of TRIED, show it."""
    for one, other in zip(_parts(few, TRIED[0]), _parts(more, TRIED[1]), strict=False):
        if one.sweep != other.sweep or (not one.sweep and len(one.runs[0]) != len(other.runs[0])):
            at = one.runs[0][0]
            raise NotUniform(f"in step {at.step}, {at.phase}, events do not grow by equal blocks")


def extrapolate(given: Sequence[Timeline], blocks: str, wanted: int) -> Timeline:
    """Return the timeline with `wanted` blocks, from those with TRIED of them.

    Raises NotUniform if it does not follow.
    """
    parts = [_parts(one, count) for one, count in zip(given, TRIED, strict=True)]
    if len({tuple(part.sweep for part in each) for each in parts}) != 1:
        raise NotUniform("blocks are not gone through in the same order")
    events: list[AllocatingOperator] = []
    for few, more, most in zip(*parts, strict=True):
        if few.sweep:
            events += _swept(few, (more, most), blocks, wanted)
        else:
            events += _affine(few.runs[0], more.runs[0], most.runs[0], wanted)
    return Timeline(events)


def _parts(given: Timeline, count: int) -> list[_Part]:
    # In a pipeline a forward may follow a backward with nothing between their blocks.
    groups = groupby(given.events, lambda event: (event.block, event.block >= 0 and event.phase))
    runs = [(block, list(group)) for (block, _), group in groups]
    parts: list[_Part] = []
    place = 0
    while place < len(runs):
        block, events = runs[place]
        if block < 0:
            parts.append(_Part(0, [events]))
            place += 1
            continue
        numbers = [number for number, _ in runs[place : place + count]]
        if numbers == list(range(count)):
            sweep = 1
        elif numbers == list(range(count))[::-1]:
            sweep = -1
        else:
            raise NotUniform(
                f"in step {events[0].step}, {events[0].phase}, blocks are not gone through one "
                f"after the other: {', '.join(map(str, numbers))}"
            )
        parts.append(_Part(sweep, [run for _, run in runs[place : place + count]]))
        place += count
    return parts


def _swept(
    few: _Part, others: tuple[_Part, _Part], blocks: str, wanted: int
) -> list[AllocatingOperator]:
    plain = [[_plain(event, blocks) for event in run] for run in few.runs]
    first, last, middle = plain[:EDGE], plain[-EDGE:], plain[EDGE]
    for other in others:
        runs = [[_plain(event, blocks) for event in run] for run in other.runs]
        inner = runs[EDGE:-EDGE]
        if runs[:EDGE] != first or runs[-EDGE:] != last or any(run != middle for run in inner):
            event = middle[0]
            raise NotUniform(f"in step {event.step}, {event.phase}, blocks differ")
    order = [*first, *([middle] * (wanted - 2 * EDGE)), *last]
    numbers = range(wanted) if few.sweep > 0 else range(wanted - 1, -1, -1)
    return [
        replace(event, block=number, module=event.module.replace("*", str(number), 1))
        for number, run in zip(numbers, order, strict=True)
        for event in run
    ]


def _plain(event: AllocatingOperator, blocks: str) -> AllocatingOperator:
    """Return the event with a star for the number of its block."""
    path = f"{blocks}.{event.block}"
    module = event.module
    if module == path or module.startswith(f"{path}."):
        module = f"{blocks}.*{module.removeprefix(path)}"
    return replace(event, module=module, block=0)


def _affine(
    few: list[AllocatingOperator],
    more: list[AllocatingOperator],
    most: list[AllocatingOperator],
    wanted: int,
) -> list[AllocatingOperator]:
    if not len(few) == len(more) == len(most):
        at = few[0]
        raise NotUniform(
            f"in step {at.step}, {at.phase}, outside of blocks the number of events grows: "
            f"{len(few)}, {len(more)}, {len(most)}"
        )
    return [_grown(a, b, c, wanted) for a, b, c in zip(few, more, most, strict=True)]


def _grown(
    few: AllocatingOperator, more: AllocatingOperator, most: AllocatingOperator, wanted: int
) -> AllocatingOperator:
    if len({(e.step, e.phase, e.module, e.operator, e.again) for e in (few, more, most)}) != 1:
        raise NotUniform(f"in step {few.step}, {few.phase}, other operators are called")
    steps = wanted - TRIED[0]
    what = f"in step {few.step}, {few.phase}, {few.operator} does"
    allocated, freed = (
        tuple(grown(sizes, steps, what) for sizes in zip(*bytes_of_all, strict=True))
        for bytes_of_all in (
            (few.allocated, more.allocated, most.allocated),
            (few.freed, more.freed, most.freed),
        )
    )
    return replace(few, allocated=allocated, freed=freed)


def grown(sizes: Sequence[int], blocks: int, what: str) -> int:
    """Extrapolate from three models, each with one block more, to `blocks` more than the first has.

    Raises NotUniform, with the words `what`, if it does not grow by a constant.
    """
    few, more, most = sizes
    if most - more != more - few:
        raise NotUniform(f"{what} not grow by a constant")
    return few + blocks * (more - few)
