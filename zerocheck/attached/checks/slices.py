"""Context of a checked step on one rank: its own shards, in slices that fit in memory.

Updates and clipping are elementwise, so a slice of shards is judged like a small model: its runs
of elements are laid end to end in one flat vector. The bounds are computed in float64, so a slice
has at most AT_ONCE elements, and the judge needs a few MiB, however large the model is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ...floating_point import Format
from ...judge.layout import ParameterLayout, ParameterPlace
from ...judge.pieces import AT_ONCE
from ...judge.state import State
from ...optimizers import STATES
from ...optimizers.specification import StateRole
from ...protocol.verdicts import Violation
from ..record.step_record import (
    AFTER,
    BEFORE,
    ELSEWHERE,
    Observed,
    ShardPiece,
    StepSummary,
    element_of,
)
from .workers import in_threads

_MARK = "\0"


class PieceRange(NamedTuple):
    """The elements [low, high) of a piece, in its row-major order."""

    number: int
    low: int
    high: int


class SliceContext:
    """A checked step on one rank, as far as its own shards tell."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    @property
    def summary(self) -> StepSummary:
        return self.observed.summary

    def value(self, what: str, number: int) -> torch.Tensor | None:
        """Return a flat tensor of a piece, or None if it has none. what: see step_record.Key."""
        return self.observed.values.get((what, number))

    @cached_property
    def hashes(self) -> list[dict[str, str]]:
        """Hash of each tensor, by piece and by what it is."""
        return [*in_threads(self.hashes_of, range(len(self.summary.pieces)))]

    def hashes_of(self, number: int) -> dict[str, str]:
        """Return the hash of each tensor of a piece."""
        found = {}
        for what, held in self.observed.values:
            if held == number:
                data = self.observed.values[what, number].view(torch.uint8)
                found[what] = hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()
        return found

    @cached_property
    def idle(self) -> frozenset[int]:
        """Pieces of which no bit may change."""
        return frozenset(
            number
            for number, piece in enumerate(self.summary.pieces)
            if piece.group != ELSEWHERE
            and (not self.took(number) or self.value("gradient", number) is None)
        )

    def took(self, number: int) -> bool:
        """Return True if the optimizer of a piece took its step."""
        step = self.summary.optimizer_of(self.summary.pieces[number])
        return step is not None and step.took

    def changed(self, number: int) -> bool:
        """Return True if a bit of the piece, its state or its step count changed."""
        if (self.summary.before[number] or 0.0) != (self.summary.after[number] or 0.0):
            return True
        return any(self._differs(role, number) for role in ("parameter", *STATES))

    def _differs(self, role: str, number: int) -> bool:
        hashes = self.hashes[number]
        before, after = hashes.get(f"{BEFORE}.{role}"), hashes.get(f"{AFTER}.{role}")
        if before is None and after is not None and role != "parameter":
            # A state that is made in a step that changes nothing is zeros.
            return bool(self.observed.values[f"{AFTER}.{role}", number].any())
        return before != after

    def slices(self, numbers: Iterable[int]) -> Iterator[Slice]:
        """Yield the elements of these pieces in slices of at most AT_ONCE elements."""
        runs: list[PieceRange] = []
        room = AT_ONCE
        for number in numbers:
            low, numel = 0, torch.Size(self.summary.pieces[number].local).numel()
            while low < numel:
                high = min(numel, low + room)
                runs.append(PieceRange(number, low, high))
                room -= high - low
                low = high
                if not room:
                    yield Slice(self, runs)
                    runs, room = [], AT_ONCE
        if runs:
            yield Slice(self, runs)


class Slice:
    """Runs of elements, end to end, as the whole of a small model."""

    def __init__(self, context: SliceContext, runs: Sequence[PieceRange]) -> None:
        self.context, self.runs = context, tuple(runs)

    @cached_property
    def layout(self) -> ParameterLayout:
        """Layout with one 1-D tensor for each run, named for `whole_tensors`."""
        pieces = self.context.summary.pieces
        places, start = [], 0
        for at, run in enumerate(self.runs):
            piece, stop = pieces[run.number], start + run.high - run.low
            places.append(
                ParameterPlace(
                    name=f"{piece.name}{_MARK}{at}{_MARK}",
                    shape=(stop - start,),
                    start=start,
                    stop=stop,
                    trainable=piece.group >= 0,
                    group=max(piece.group, 0),
                    format=Format.of(piece.torch_dtype),
                )
            )
            start = stop
        return ParameterLayout.of_places(places)

    @property
    def has(self) -> list[bool]:
        """True, by run, where the optimizer was given a gradient."""
        return [run.number not in self.context.idle for run in self.runs]

    def has_any(self, what: str) -> bool:
        """Return True if a piece of the slice has such a tensor."""
        return any(self.context.value(what, run.number) is not None for run in self.runs)

    def flat(self, what: str) -> torch.Tensor:
        """Return one vector of all runs; zeros for absent states, as before the first step."""
        return torch.cat([self._part(what, run) for run in self.runs])

    def _part(self, what: str, run: PieceRange) -> torch.Tensor:
        value = self.context.value(what, run.number)
        if value is not None:
            return value[run.low : run.high]
        dtype = self.context.summary.pieces[run.number].torch_dtype
        return torch.zeros(run.high - run.low, dtype=dtype)

    def state(self, when: str, roles: Iterable[StateRole]) -> State:
        """Return the state before or after the step."""
        counts = self.context.summary.before if when == BEFORE else self.context.summary.after
        parameter = self.flat(f"{when}.parameter")
        moments: dict[str, torch.Tensor] = {role: self.flat(f"{when}.{role}") for role in roles}
        steps: list[float | None] = [counts[run.number] or 0.0 for run in self.runs]
        return State(parameter, [parameter], moments, {}, steps)

    def whole_tensors(self, violation: Violation) -> Violation:
        """Translate a violation to the names and elements of the whole tensors."""
        element = violation.element
        if element:
            run = self.runs[int(violation.tensors[0].split(_MARK)[1])]
            element = element_of(self._piece(run), run.low + element[0])
        return replace(
            violation,
            tensors=tuple(dict.fromkeys(_plain(name) for name in violation.tensors)),
            element=element,
            explanation=_plain(violation.explanation),
            attribution=_plain(violation.attribution),
            parts=tuple(self.whole_tensors(part) for part in violation.parts),
        )

    def _piece(self, run: PieceRange) -> ShardPiece:
        return self.context.summary.pieces[run.number]


def _plain(text: str) -> str:
    """Remove the marks of runs from a text."""
    return re.sub(f"{_MARK}\\d+{_MARK}", "", text)
