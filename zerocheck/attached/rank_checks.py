"""Checks of a rank's own shards.

The update and clipping are elementwise, so the checks need no communication. The parameters are
taken in batches of at most BATCH elements, since the bounds are computed in float64: the judge
needs a few hundred MiB, however large the model is.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec.structs import replace

from zerocheck_reference import clip_coefficient

from .. import causes as bugs
from ..case.schema import Optimizer
from ..floating_point import Format
from ..judge.clipping import clipped_enclosure
from ..judge.compare import compare, describe, different_bits
from ..judge.diagnose.clip import clip_causes
from ..judge.layout import ParameterLayout, ParameterPlace
from ..judge.state import State
from ..judge.update import Update, UpdateJudge, UpdateRecipe
from ..optimizers import STATES, optimizer_of, states_of
from ..optimizers.specification import Reading
from ..protocol.verdicts import Violation
from .step_record import Clip, Observed, RankVerdict, ShardPiece, element_of

BATCH = 1 << 22
"""Elements that are judged at once; 32 MiB for each vector in float64."""

ORDER = ("step", *STATES, "parameter")
"""Of what an optimizer computes: what comes first is wrong first."""


class PieceRange(NamedTuple):
    """The elements [low, high) of a piece, in its row-major order."""

    number: int
    low: int
    high: int


def judge_own(observed: Observed) -> RankVerdict:
    """Judge this rank's own shards, and collect the data that the other ranks need for the rest."""
    with torch.no_grad():
        return _Own(observed).told()


@dataclass
class _Own:
    observed: Observed

    def told(self) -> RankVerdict:
        seen = self.observed.seen
        self.hashes = [self._hashes(number) for number in range(len(seen.pieces))]
        shares: dict[str, float] = {}
        violations: list[Violation] = []
        still = self._still()
        for obligation, found in (
            ("update", [self._untouched(still)] if still else []),
            ("update", [*self._updates(still)]),
            ("clip", [self._clipped(clip) for clip in seen.clips]),
        ):
            for share, violation in found:
                shares[obligation] = max(share, shares.get(obligation, 0.0))
                if violation is not None:
                    violations.append(replace(violation, ranks=(seen.rank,), step=seen.number))
        squares, peaks = self._sizes()
        return RankVerdict(
            seen=seen,
            hashes=tuple(self.hashes),
            squares=squares,
            peaks=peaks,
            shares=shares,
            violations=tuple(violations),
        )

    def _value(self, what: str, number: int) -> torch.Tensor | None:
        return self.observed.values.get((what, number))

    def _hashes(self, number: int) -> dict[str, str]:
        found = {}
        for what, held in self.observed.values:
            if held == number:
                data = self.observed.values[what, number].view(torch.uint8)
                found[what] = hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()
        return found

    def _sizes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        squares, peaks = [], []
        for number in range(len(self.observed.seen.pieces)):
            gradient = self._value("reduced", number)
            if gradient is None:
                gradient = self._value("gradient", number)
            if gradient is None:
                squares.append(-1.0)
                peaks.append(-1.0)
                continue
            parts = torch.split(gradient, BATCH)
            squares.append(math.fsum(float(part.double().square().sum()) for part in parts))
            peaks.append(float(gradient.abs().max()) if gradient.numel() else 0.0)
        return tuple(squares), tuple(peaks)

    def _still(self) -> set[int]:
        """Return the pieces of which no bit may change."""
        seen = self.observed.seen
        if seen.skipped or not seen.ran:
            return set(range(len(seen.pieces)))
        return {
            number
            for number, piece in enumerate(seen.pieces)
            if piece.group < 0 or self._value("gradient", number) is None
        }

    def _untouched(self, still: Iterable[int]) -> tuple[float, Violation | None]:
        seen = self.observed.seen
        for role in ("parameter", *STATES):
            changed = [n for n in sorted(still) if self._changed(role, n)]
            if changed:
                return 0.0, self._moved(role, changed)
        for number in still:
            if (seen.before[number] or 0.0) != (seen.after[number] or 0.0):
                return 0.0, Violation(
                    obligation="update",
                    step=seen.number,
                    role="step",
                    tensors=(seen.pieces[number].name,),
                    ranks=(),
                    explanation=f"{self._why_still(number)}, but the optimizer counts it",
                    observed=seen.after[number],
                    expected=seen.before[number],
                    causes=self._still_causes(),
                )
        return 0.0, None

    def _changed(self, role: str, number: int) -> bool:
        told = self.hashes[number]
        before, after = told.get(f"before.{role}"), told.get(f"after.{role}")
        if before is None and after is not None and role != "parameter":
            # A state that is made in a step that changes nothing is zeros.
            return bool(self.observed.values[f"after.{role}", number].any())
        return before != after

    def _moved(self, role: str, numbers: list[int]) -> Violation:
        seen = self.observed.seen
        wrong = total = 0
        for number in numbers:
            new = self.observed.values.get((f"after.{role}", number))
            old = self.observed.values.get((f"before.{role}", number))
            if new is None or old is None:
                continue
            mask = different_bits(new, old)
            wrong, total = wrong + int(mask.sum()), total + mask.numel()
        number = numbers[0]
        new = self.observed.values.get((f"after.{role}", number))
        old = self.observed.values.get((f"before.{role}", number))
        first = 0
        if new is not None and old is not None:
            first = int(different_bits(new, old).nonzero()[0])
        return Violation(
            obligation="update",
            step=seen.number,
            role=role,
            tensors=tuple(dict.fromkeys(seen.pieces[n].name for n in numbers)),
            ranks=(),
            element=element_of(seen.pieces[number], first),
            observed=None if new is None else float(new[first]),
            expected=None if old is None else float(old[first]),
            bound=0.0,
            wrong=wrong,
            total=total,
            explanation=f"{self._why_still(number)}, but its {role} changed",
            causes=self._still_causes(),
        )

    def _why_still(self, number: int) -> str:
        seen = self.observed.seen
        name = seen.pieces[number].name
        if seen.skipped:
            return f"the step was skipped, so {name} must stay as it was"
        if not seen.ran:
            return f"the optimizer took no step, so {name} must stay as it was"
        if seen.pieces[number].group < 0:
            return f"{name} is frozen, or the optimizer does not have it"
        return f"{name} has no gradient, so it must stay as it was"

    def _still_causes(self) -> tuple[str, ...]:
        if self.observed.seen.skipped:
            return (bugs.SKIPPED_STEP_CHANGED_THE_STATE,)
        return (bugs.UNTOUCHED_PARAMETER_CHANGED,)

    def _updates(self, still: set[int]) -> Iterator[tuple[float, Violation | None]]:
        """Yield (share, violation) of the parameters of which this rank holds the state."""
        seen = self.observed.seen
        if seen.skipped or not seen.ran:
            return
        kinds: dict[Optimizer, list[int]] = {}
        for number, piece in enumerate(seen.pieces):
            if number in still:
                continue
            options = seen.options[piece.group].optimizer
            states = states_of(options)
            # Without any state every rank that holds a parameter has what its owner made of it.
            if not states or self._value(f"after.{states[0]}", number) is not None:
                kinds.setdefault(options, []).append(number)
        groups = tuple(one.group for one in seen.options)
        for options, numbers in kinds.items():
            given = replace(options, groups=groups)
            recipe = UpdateRecipe(optimizer_of(given), given, [one.rates for one in seen.options])
            readings = list(recipe.optimizer.readings)
            share, found = 0.0, []
            for batch in batches(numbers, seen.pieces):
                used, violation, readings = self._update(batch, recipe, readings)
                share = max(share, used)
                if violation is not None:
                    found.append(violation)
            yield share, merged(found)

    def _update(
        self, batch: Sequence[PieceRange], recipe: UpdateRecipe, readings: list[Reading]
    ) -> tuple[float, Violation | None, list[Reading]]:
        seen = self.observed.seen
        layout = layout_of(batch, seen.pieces)

        def flat(what: str) -> torch.Tensor:
            return torch.cat([self._part(what, run) for run in batch])

        def state(when: str, counts: Sequence[float | None]) -> State:
            parameter = flat(f"{when}.parameter")
            roles = recipe.optimizer.states_with(recipe.options)
            moments: dict[str, torch.Tensor] = {role: flat(f"{when}.{role}") for role in roles}
            steps: list[float | None] = [counts[run.number] or 0.0 for run in batch]
            return State(parameter, [parameter], moments, {}, steps)

        judge = UpdateJudge(layout, recipe)
        judge.readings = readings
        reduced = any(self._value("reduced", run.number) is not None for run in batch)
        share, violation = judge.check(
            Update(
                state("before", seen.before),
                state("after", seen.after),
                flat("gradient"),
                0.0,
                [options.lr for options in seen.options],
                [True] * len(batch),
                flat("reduced") if reduced else None,
            ),
            step=seen.number - 1,
        )
        if violation is not None:
            violation = in_whole_tensors(violation, batch, seen.pieces)
        return share, violation, judge.readings

    def _part(self, what: str, run: PieceRange) -> torch.Tensor:
        """Return the elements of a run; zeros for absent states, as before the first step."""
        value = self._value(what, run.number)
        if value is not None:
            return value[run.low : run.high]
        dtype = self.observed.seen.pieces[run.number].torch_dtype
        return torch.zeros(run.high - run.low, dtype=dtype)

    def _clipped(self, clip: Clip) -> tuple[float, Violation | None]:
        """Return the clipped gradient, from this rank's own and the reported norm."""
        seen = self.observed.seen
        if clip.kind not in ("2", "inf"):
            return 0.0, None
        formats = {Format.of(seen.pieces[number].torch_dtype) for number in clip.pieces}
        narrow = all(format.narrow for format in formats)
        share, found = 0.0, []
        for batch in batches(clip.pieces, seen.pieces):
            layout = layout_of(batch, seen.pieces)
            before = torch.cat([self._part("reduced", run) for run in batch]).double()
            after = torch.cat([self._part("clipped", run) for run in batch])
            enclosure = clipped_enclosure(
                before, clip.norm, clip.max_norm, layout.formats, all_narrow=narrow
            )
            used, misfit = compare(after, enclosure)
            share = max(share, used)
            if misfit is None:
                continue
            factor = clip_coefficient(clip.norm, clip.max_norm)
            text, causes = clip_causes(
                after, before, clip.norm, factor, clip.max_norm, layout.formats, misfit.outside
            )
            violation = describe(
                misfit,
                layout,
                obligation="clip",
                step=seen.number,
                role="gradient",
                ranks=(),
                explanation=text,
                causes=causes,
            )
            found.append(in_whole_tensors(violation, batch, seen.pieces))
        return share, merged(found)


def batches(numbers: Iterable[int], pieces: Sequence[ShardPiece]) -> Iterator[list[PieceRange]]:
    """Yield the elements of these pieces in runs, at most BATCH together."""
    batch: list[PieceRange] = []
    room = BATCH
    for number in numbers:
        low, numel = 0, torch.Size(pieces[number].local).numel()
        while low < numel:
            high = min(numel, low + room)
            batch.append(PieceRange(number, low, high))
            room -= high - low
            low = high
            if not room:
                yield batch
                batch, room = [], BATCH
    if batch:
        yield batch


def layout_of(batch: Sequence[PieceRange], pieces: Sequence[ShardPiece]) -> ParameterLayout:
    """Lay the runs out end to end, each as a 1-D tensor named for `in_whole_tensors`."""
    places, start = [], 0
    for at, run in enumerate(batch):
        piece, stop = pieces[run.number], start + run.high - run.low
        format = Format.of(piece.torch_dtype)
        name = f"{piece.name}{_MARK}{at}{_MARK}"
        group = max(piece.group, 0)
        places.append(ParameterPlace(name, (stop - start,), start, stop, True, group, format))
        start = stop
    return ParameterLayout.of_places(places)


_MARK = "\0"


def in_whole_tensors(
    violation: Violation, batch: Sequence[PieceRange], pieces: Sequence[ShardPiece]
) -> Violation:
    """Translate a violation of a layout of runs to the names and elements of the whole tensors."""
    element = violation.element
    if element:
        run = batch[int(violation.tensors[0].split(_MARK)[1])]
        element = element_of(pieces[run.number], run.low + element[0])

    def plain(text: str) -> str:
        return re.sub(f"{_MARK}\\d+{_MARK}", "", text)

    return replace(
        violation,
        tensors=tuple(dict.fromkeys(plain(name) for name in violation.tensors)),
        element=element,
        explanation=plain(violation.explanation),
    )


def merged(found: Sequence[Violation]) -> Violation | None:
    """Merge the violations of all batches: what is computed first, where it is worst.

    Causes are those that explain all of them, if there are any; else those of the worst.
    """
    if not found:
        return None
    role = min((one.role for one in found), key=_order)
    same = [one for one in found if one.role == role]
    worst = max(same, key=_severity)
    causes = [cause for cause in worst.causes if all(cause in one.causes for one in same)]
    tensors = dict.fromkeys([*worst.tensors, *(name for one in same for name in one.tensors)])
    return replace(
        worst,
        tensors=tuple(tensors),
        wrong=sum(one.wrong for one in same),
        total=sum(one.total for one in same),
        causes=tuple(causes) or worst.causes,
    )


def _order(role: str) -> int:
    return ORDER.index(role) if role in ORDER else len(ORDER)


def _severity(violation: Violation) -> float:
    return torch.inf if violation.ratio is None else violation.ratio
