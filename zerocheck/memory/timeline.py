"""Live memory over time, from the log of a run: events, peaks, bytes at the end of a phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from ..protocol.layout import CATEGORIES, PHASES, Category, Line, Phase
from .log import Log

Bytes = tuple[int, ...]
"""Bytes of each category, in the order of CATEGORIES."""
SHARDS: tuple[Category, ...] = ("parameter", "gradient", "optimizer")
NOTHING: Bytes = (0,) * len(CATEGORIES)


@dataclass(frozen=True, slots=True)
class AllocatingOperator:
    """Operator that allocates, with the bytes freed between it and the next one.

    module: the innermost one; block: number of the block that it is in, or for which it allocates,
    -1 for none; allocated, freed: bytes by category, both positive.
    """

    step: int
    phase: Phase
    module: str
    operator: str
    again: bool
    block: int
    allocated: Bytes
    freed: Bytes


class HeldBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Live memory at one instant.

    bytes: by category, without empty ones; asked: bytes that the operator has just allocated,
    included in `bytes`.
    """

    step: int
    phase: Phase
    module: str
    operator: str
    recomputed: bool
    asked: int
    bytes: dict[Category, int]

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(self.bytes.values())


class Timeline:
    """Events in their order, from the first storage to the end of the last step.

    The peaks leave `built` out: how a model comes to the device is its own matter.
    """

    def __init__(self, events: Sequence[AllocatingOperator]) -> None:
        self.events = list(events)

    def instants(self) -> Iterator[tuple[AllocatingOperator, list[int], list[int]]]:
        """Yield each event with the bytes live at it (the peak) and after the frees that follow.

        The lists are changed in place: copy those to keep.
        """
        held = list(NOTHING)
        for event in self.events:
            held = [a + b for a, b in zip(held, event.allocated, strict=True)]
            after = [a - b for a, b in zip(held, event.freed, strict=True)]
            yield event, held, after
            held = after

    def lines(self) -> tuple[Line, ...]:
        """Return the live memory at the end of each phase of each step, by category."""
        ends: dict[tuple[int, Phase], list[int]] = {}
        for event, _, after in self.instants():
            ends[event.step, event.phase] = list(after)
        return tuple(
            Line(phase, step, category, size)
            for (step, phase), held in ends.items()
            for category, size in zip(CATEGORIES, held, strict=True)
            if size
        )

    def at_end(self, phase: Phase, step: int) -> dict[Category, int]:
        """Return the bytes by category at the end of a phase."""
        lines = [line for line in self.lines() if (line.phase, line.step) == (phase, step)]
        return {line.category: line.bytes for line in lines}

    def microbatches(self, step: int) -> list[list[AllocatingOperator]]:
        """Return the events of each forward with the backward that follows, in one step."""
        found: list[list[AllocatingOperator]] = []
        for phase, events in groupby(
            (one for one in self.events if one.step == step), lambda one: one.phase
        ):
            if phase == "forward":
                found.append(list(events))
            elif phase == "backward" and found:
                found[-1] += events
        return found

    def peak(self) -> HeldBytes:
        """Return the first instant with the most bytes."""
        return max(self.peaks().values(), key=lambda held: held.total)

    def peaks(self) -> dict[tuple[int, Phase, str], HeldBytes]:
        """Return the peak within each module in each phase of each step, in order of time."""
        best: dict[tuple[int, Phase, str], tuple[int, AllocatingOperator, list[int]]] = {}
        for event, held, _ in self.instants():
            if event.phase == "built":
                continue
            total = sum(held)
            key = event.step, event.phase, event.module
            if key not in best or total > best[key][0]:
                best[key] = total, event, list(held)
        return {key: held_at(event, held) for key, (_, event, held) in best.items()}

    def first_over(self, limit: int) -> HeldBytes | None:
        """Return the first instant with more than `limit` live bytes, or None."""
        for event, held, _ in self.instants():
            if sum(held) > limit:
                return held_at(event, held)
        return None


def held_at(event: AllocatingOperator, held: Sequence[int]) -> HeldBytes:
    """Return the live memory at an event."""
    return HeldBytes(
        step=event.step,
        phase=event.phase,
        module=event.module,
        operator=event.operator,
        recomputed=event.again,
        asked=sum(event.allocated),
        bytes={c: size for c, size in zip(CATEGORIES, held, strict=True) if size},
    )


def of_shards(held: Mapping[Category, int]) -> int:
    """Return the bytes of parameters, gradients and optimizer states, of which formulas are."""
    return sum(held.get(category, 0) for category in SHARDS)


def timeline(log: Log, blocks: str, *, host: bool = False) -> Timeline:
    """Events of a log. blocks: path of the list of blocks; host: in its memory, not the device's.

    All that happens while the implementation is built is one event.
    """
    events: list[AllocatingOperator] = []
    current: int | None = None
    allocated, freed = list(NOTHING), list(NOTHING)
    block = -1
    place = {category: index for index, category in enumerate(CATEGORIES)}

    def close() -> None:
        if current is not None:
            at = log.moments[current]
            events.append(AllocatingOperator(*at, block, tuple(allocated), tuple(freed)))

    for moment, number, more in log.changes:
        if log.moments[moment].phase == "closed":
            break
        if (log.storages[number].place == "device") == host:
            continue
        if current is None or moment != current:
            close()
            current = moment
            allocated, freed = list(NOTHING), list(NOTHING)
            block = _block(log.moments[moment].module, blocks)
        storage = log.storages[number]
        if more > 0:
            allocated[place[storage.kind]] += more
            if block < 0:
                block = _block(storage.holder, blocks)
        else:
            freed[place[storage.kind]] -= more
    close()
    return Timeline(_built_as_one(events))


def _built_as_one(events: Sequence[AllocatingOperator]) -> list[AllocatingOperator]:
    first = [event for event in events if event.phase == PHASES[0]]
    rest = [event for event in events if event.phase != PHASES[0]]
    if not first:
        return rest
    net = [sum(e.allocated[i] - e.freed[i] for e in first) for i in range(len(CATEGORIES))]
    one = replace(
        first[0],
        module="",
        operator="",
        block=-1,
        allocated=tuple(max(size, 0) for size in net),
        freed=tuple(max(-size, 0) for size in net),
    )
    return [one, *rest]


def _block(path: str, blocks: str) -> int:
    """Return the number of the block in a path such as `blocks.3.mlp.up`, -1 for none."""
    if not blocks or not path.startswith(f"{blocks}."):
        return -1
    number = path.removeprefix(f"{blocks}.").partition(".")[0]
    return int(number) if number.isdigit() else -1
