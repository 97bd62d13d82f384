"""Changes that a script makes to gradients between the end of their reduction and the step.

Scaling by a token count that is known last, adaptive clipping, limits, noise, gradients set to
None. The reduction is judged where it ends; such a change is reported, and is no violation, and the
update is judged with what the optimizer was given. Three changes are exceptions:

- one factor for all gradients is a part of the declared weights of tokens
- a factor of W or 1 / W contradicts the declared average over ranks, and one of 0 loses the
  gradient: what the optimizer was given is judged in place of the reduction
- ranks must not multiply the shards of one gradient by different factors, as where each clips by
  the norm of its own shard
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zerocheck_reference import unit_roundoff

from ... import causes as bugs
from ...contract.semantics import Semantics
from ...judge.attribution.tensors import tensors
from ...judge.pieces import split
from ...protocol.verdicts import Violation
from ..record.run_parameters import layout_of, run_parameters
from ..record.step_record import ACCUMULATED, GIVEN, GradientChange, Point, RankVerdict, StepSummary
from .slices import SliceContext
from .workers import in_threads

ROUNDINGS = 8
"""Of a gradient that is multiplied four times by a script, compared with a product by one factor:
four of its own, and as many of the factor, which is read off it."""

REPORTED = "what the script does to it between the backward and the step"


class _Piece(NamedTuple):
    """Change of a piece. factor: None where elements change otherwise; length: of its gradient."""

    name: str
    factor: float | None
    length: float
    removed: bool = False


def change_of(context: SliceContext) -> GradientChange | None:
    """Return what the script did to the gradients that a rank holds; None for nothing."""
    pieces, observed = context.summary.pieces, context.observed
    taken = [number for number in range(len(pieces)) if context.took(number)]
    if not any((ACCUMULATED, number) in observed.values for number in taken):
        return None

    def changed(number: int) -> _Piece | None:
        before = observed.gradient(number, ACCUMULATED)
        after = observed.gradient(number)
        if before is None:
            return None
        return _change(pieces[number].name, before, after)

    parts = [part for part in in_threads(changed, taken) if part is not None]
    bound = ROUNDINGS * max(unit_roundoff(pieces[number].torch_dtype) for number in taken)
    scaled = [part for part in parts if part.factor is not None and part.length]
    first = max(scaled, key=lambda part: part.length, default=None)
    factor = None if first is None or any(part.factor is None for part in parts) else first.factor
    if factor is not None and not all(_equal(part.factor, factor, bound) for part in scaled):
        factor = None
    return GradientChange(
        factor=factor,
        bound=bound,
        count=sum(part.length > 0 for part in parts),
        scaled=_names(part for part in scaled if not _equal(part.factor, 1.0, bound)),
        edited=_names(part for part in parts if part.factor is None and not part.removed),
        removed=_names(part for part in parts if part.removed),
    )


def _change(name: str, before: torch.Tensor, after: torch.Tensor | None) -> _Piece:
    if after is None:
        return _Piece(name, None, 0.0, removed=True)
    across = inside = 0.0
    for here in split(len(before)):
        was, now = before[here].double(), after[here].double()
        across += float(was @ now)
        inside += float(was @ was)
    factor = across / inside if inside else 1.0
    unit, tiny = unit_roundoff(before.dtype), torch.finfo(before.dtype).tiny
    for here in split(len(before)):
        product = before[here].double() * factor
        bound = ROUNDINGS * unit * product.abs() + tiny
        if not bool(((after[here].double() - product).abs() <= bound).all()):
            return _Piece(name, None, inside)
    return _Piece(name, factor, inside)


def _equal(factor: float | None, other: float, bound: float) -> bool:
    return factor is not None and abs(factor - other) <= bound * abs(other)


def _names(parts: Iterable[_Piece]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.name for part in parts))


class ScriptChanges:
    """Changes that the script made to the gradients of all ranks in a step."""

    def __init__(self, summaries: Sequence[StepSummary], changes: Sequence[GradientChange | None]):
        """Take the changes of each rank, None where nothing changed."""
        self._summaries = summaries
        self._changes = {rank: one for rank, one in enumerate(changes) if one is not None}
        self.bound = max((one.bound for one in self._changes.values()), default=0.0)

    @classmethod
    def of(cls, verdicts: Sequence[RankVerdict]) -> ScriptChanges:
        """Return those of a step."""
        return cls([one.summary for one in verdicts], [one.change for one in verdicts])

    def __bool__(self) -> bool:
        return bool(self._changes)

    @property
    def _factors(self) -> dict[int, float | None]:
        """Factor by rank, without ranks that hold no gradient."""
        return {rank: one.factor for rank, one in self._changes.items() if one.count}

    @property
    def factor(self) -> float:
        """The factor of all gradients on all ranks; 1 where there is none."""
        factors = [*self._factors.values()]
        first = factors[0] if factors else None
        every = first is not None and all(_equal(one, first, self.bound) for one in factors)
        return first if every and first is not None else 1.0

    def points(self, semantics: Semantics) -> tuple[Point, ...]:
        """Return where the gradient is judged: the second point if the first one is violated.

        A reduction by the script itself, and a division that a wrapper leaves to it, end where the
        optimizer is given the gradient.
        """
        lost = not self._factors or self.factor == 0.0
        if not self or lost or (semantics.weight != "token" and self._of_ranks):
            return (GIVEN,)
        return ACCUMULATED, GIVEN

    @property
    def _of_ranks(self) -> bool:
        """True for a factor of W or 1 / W, unless it may be 1 / microbatches.

        For one of the microbatches, where the schedule of a pipeline divides by them.
        """
        first = self._summaries[0]
        world, count = first.reducing, max(1, first.forwards)
        if first.divided > 1:  # the schedule has divided by them
            return any(_equal(self.factor, value, self.bound) for value in (count, 1 / count))
        if world == 1 or _equal(self.factor, 1 / count, self.bound):
            return False
        return any(_equal(self.factor, value, self.bound) for value in (world, 1 / world))

    def unequal(self) -> Violation | None:
        """Return the violation of ranks that multiply their shards by different factors."""
        several = {rank: one for rank, one in self._changes.items() if one.count > 1}
        factors = {rank: one.factor for rank, one in several.items() if one.factor is not None}
        if not factors or len(factors) < len(several) or self.factor != 1.0:
            return None
        (low_rank, low), (high_rank, high) = (
            pick(factors.items(), key=lambda item: item[1]) for pick in (min, max)
        )
        if _equal(low, high, self.bound):
            return None
        summary = self._summaries[0]
        return Violation(
            obligation="gradient",
            step=summary.number,
            role="gradient",
            tensors=(),
            ranks=tuple(factors),
            explanation=f"between the backward and the step, rank {low_rank} multiplies its "
            f"gradients by {low:.6g} and rank {high_rank} by {high:.6g}; a coefficient must be "
            "equal on all ranks, as that from the norm over all of them is",
            observed=high,
            expected=low,
            bound=self.bound * abs(low),
            causes=(bugs.RANKS_DISAGREE,),
        )

    def text(self, semantics: Semantics) -> str:
        """Return what the script does, or "" if it is nothing or what is declared."""
        factor = self.factor
        if factor != 1.0:
            declared = semantics.weight == "token"
            words = f"it multiplies every gradient by {factor:.6g}"
            return "" if declared else f"{REPORTED}: {words}"
        layout = layout_of(run_parameters(self._summaries))
        done: list[str] = []
        known: set[str] = set()
        for words, field in (
            ("removes {}", "removed"),
            ("changes elements of {}", "edited"),  # a shard of one element is scaled by any change
            ("multiplies {} by a factor for each tensor", "scaled"),
        ):
            names = {name for one in self._changes.values() for name in getattr(one, field)}
            names, known = names - known, known | names
            if names:
                done.append(words.format(tensors(names, layout)))
        return f"{REPORTED}: it {', and '.join(done)}" if done else ""
