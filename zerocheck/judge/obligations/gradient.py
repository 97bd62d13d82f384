"""Obligation: given the parameters, the reduced gradient is that of the declared semantics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...case.schema import Case
from ...case.shapes import unfrozen
from ...contract.semantics import Semantics
from ...protocol.verdicts import Violation, with_parts
from .. import bounds
from ..assemble import RoleState
from ..bounds import Enclosure, Format
from ..compare import all_finite, compare_pieces, describe
from ..diagnose.by_tensor import causes_by_tensor
from ..diagnose.evidence import Evidence
from ..diagnose.gradient import UNEXPLAINED, causes
from ..diagnose.loss import seeded_alike
from ..flat import FlatBuffer
from ..layout import ParameterLayout
from ..local import Passes, Scale
from ..pieces import Enclosing, Positions, in_pieces
from ..precision import Path, declared, path_of


class Expected(NamedTuple):
    """Enclosure of the reduced gradient, and the parameters that have one at all."""

    of: Enclosing
    used: list[bool]

    @property
    def enclosure(self) -> Enclosure:
        """Enclosure of the whole vector."""
        return self.of.whole


def loss_divisor(case: Case, semantics: Semantics) -> float:
    """Return the divisor of the loss before the backward."""
    divisor = case.training.microbatches if semantics.divide == "loss" else 1
    return float(divisor * loss_ranks(case, semantics))


def loss_ranks(case: Case, semantics: Semantics) -> int:
    """Number of times a rank's gradient counts in the mean by which losses are divided, else 1."""
    return case.readers if semantics.in_losses else 1


def expected(
    passes: Passes,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    scales: Sequence[float] = (),
    noise: torch.Tensor | float = 0.0,
) -> Expected:
    """Sum all local gradients over the declared divisor, and enclose the result.

    noise: how far the sum of local gradients can be off, where kernels are not the reference's.
    scales: loss scale of each rank. It is divided out after the reduction: exactly by a power of
    two, else with two roundings more; what underflows loses at most eta, before (divided by the
    scale) and after. Where the sum is not finite, it must be exactly that.
    """
    world, count = passes.gradients.shape[:2]
    divisor = float(world) if semantics.average == "mean" else 1.0
    if semantics.divide == "gradient":
        divisor *= count
    roundings = bounds.gradient_roundings(
        world_size=world,
        microbatches=count,
        average=semantics.reduction,
        divide=semantics.divide,
        accumulate=semantics.accumulate,
        mesh=case.mesh,
    )
    if any(math.frexp(scale)[0] != 0.5 for scale in scales):
        roundings += 2
    scaled = any(scale != 1.0 for scale in scales)
    mixed = declared(semantics)
    path = path_of(case, semantics, microbatches=count) if mixed else ()

    def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
        over = torch.zeros((), dtype=torch.bool)
        if mixed:
            scale = min(scales, default=1.0)
            bound, over = _along(exact, absolute, path, format, scale, divisor)
        else:
            bound = bounds.gradient(exact, absolute, roundings, format).bound
        if scaled:
            bound = bound + format.eta * (1 + roundings / min(scales))
        if not all_finite(exact):
            bound = torch.where(exact.isfinite(), bound, 0.0)
        if bool(over.any()):
            # Then anything comes of the sum that is not finite; and nothing else, of such terms.
            exact = torch.where(over & ~exact.isfinite(), math.nan, exact)
            bound = bound.masked_fill(over, math.inf)
        return Enclosure(exact, bound)

    def estimated(exact: torch.Tensor, bound: torch.Tensor, at: Positions | None) -> Enclosure:
        if not isinstance(noise, torch.Tensor):
            return Enclosure(exact, bound)
        own = (noise if at is None else noise[at]) / divisor
        return Enclosure(exact, bound + torch.where(exact.isfinite(), own, 0.0))

    def at(positions: Positions | None) -> Enclosure:
        some = passes.gradients if positions is None else passes.gradients[..., positions]
        terms = some.to(torch.float64)
        exact = terms.sum((0, 1)) / divisor
        absolute = terms.abs().sum((0, 1)) / divisor
        derived = layout.formats.at(positions).enclose(enclosure, exact, absolute)
        return estimated(*derived, positions)

    return Expected(Enclosing(layout.size, at), passes.used.any(0).tolist())


def _along(
    exact: torch.Tensor,
    absolute: torch.Tensor,
    path: Path,
    format: Format,
    scale: float,
    divisor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound along the path into a parameter's format, and an overflow mask.

    The mask is set where a partial sum can overflow fp16: none is larger than the absolute sum
    before it was divided.
    """
    if format.narrow and (not path or path[-1][1] != format):
        path = (*path, (1, format))
    over = torch.zeros((), dtype=torch.bool)
    for count, one in path:
        if one.dtype == torch.float16:
            largest = absolute * (scale * divisor * math.exp(2 * count * one.u))
            over = over | ~(largest < torch.finfo(one.dtype).max)
    return bounds.along(exact, absolute, path, scale).bound, over


def check(
    held: RoleState | None,
    wanted: Expected,
    passes: Passes,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
    again: Callable[[Scale], Passes] | None = None,
    otherwise: Callable[[], Passes] | None = None,
    previous: Callable[[], torch.Tensor | None] = lambda: None,
    used_before: Sequence[bool] = (),
    loss_scale: float = 1.0,
    buffers: Callable[[], Sequence[FlatBuffer]] = tuple,
    unclipped_before: Callable[[], torch.Tensor | None] = lambda: None,
    left: Sequence[Sequence[str]] = (),
    noise: torch.Tensor | float = 0.0,
    diagnose: bool = True,
) -> tuple[float, Violation | None]:
    """Check the gradient exposed at `reduced`: (share of the bound, violation or None).

    used_before: per parameter, whether a step before this one used it; buffers: asked for the flat
    buffers of the implementation if something is wrong; previous, unclipped_before: asked for then
    too, see Evidence; left: see diagnose/loss.py; noise: as of `expected`;
    diagnose: look for the cause.
    """
    kept = () if case.training.set_to_none else used_before
    violation = _existence(held, wanted, layout, case, semantics, step, kept)
    if violation is not None or held is None:
        return 0.0, violation
    share = 0.0
    bad: list[int] = []
    first = None
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        if rank and plan is held.plans[0] and torch.equal(part, held.parts[0]):
            if 0 in bad:
                bad.append(rank)
            continue
        used, misfit = compare_pieces(
            lambda here, there, part=part: (part[here], wanted.of.at(there)),  # type: ignore[misc]
            plan.index,
            layout.size,
        )
        share = max(share, used)
        if misfit is not None:
            bad.append(rank)
            if first is None:
                first = (misfit, plan.index)
    if first is None:
        return share, None
    misfit, elements = first
    found, evidence = UNEXPLAINED, None
    if diagnose:
        evidence = Evidence(
            held,
            passes,
            wanted.of,
            layout,
            case,
            semantics,
            again,
            previous(),
            otherwise,
            loss_scale,
            buffers(),
            None if case.training.clip is None else unclipped_before(),
            seeded_alike(left),
            noise,
        )
        found = causes(evidence)
    violation = describe(
        misfit,
        layout,
        obligation="gradient",
        step=step,
        role="gradient",
        ranks=tuple(bad),
        elements=elements,
        explanation=found.explanation,
        causes=found.names,
    )
    if evidence is not None and not found.names and not in_pieces(None, layout.size):
        violation = with_parts(violation, causes_by_tensor(evidence))
    return share, violation


def _existence(
    held: RoleState | None,
    wanted: Expected,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    step: int,
    kept: Sequence[bool],
) -> Violation | None:
    """Check that gradients exist for used parameters and, with `skip`, for no others.

    kept: parameters whose gradient an earlier step made. `zero_grad(set_to_none=False)` leaves it
    there as zeros, on one device too; it may exist though this step does not use the parameter.
    What is unfrozen later has none until then.
    """
    if held is None:
        return None
    later = unfrozen(case)
    frozen = later if step < (case.training.unfreeze or 0) else ()
    for position, place in enumerate(layout.places):
        if not place.trainable:
            continue
        used = wanted.used[position]
        there = tuple(r for r, plan in enumerate(held.plans) if place.name in plan.present)
        lacking = tuple(r for r, plan in enumerate(held.plans) if place.name in plan.absent)
        if there and place.name in frozen:
            return _exists(
                step,
                place.name,
                there,
                "a gradient exists though the parameter is frozen: an optimizer would move it",
                bugs.GRADIENT_OF_A_FROZEN_PARAMETER,
            )
        nowhere = place.name in later and not there
        if used and (not there or lacking) and place.stop > place.start:
            return _exists(
                step,
                place.name,
                lacking,
                "a gradient is missing (None) though the parameter was used"
                + (", and unfrozen" if nowhere else ""),
                bugs.NOT_UNFROZEN if nowhere else bugs.GRADIENT_MISSING,
            )
        zeroed = bool(kept) and kept[position]
        if not used and there and not zeroed and semantics.unused == "skip":
            return _exists(
                step,
                place.name,
                there,
                "a gradient exists though no rank used the parameter; the declared semantics "
                "(unused='skip') leave it alone, an optimizer would move it",
                bugs.NONE_BECAME_ZERO,
            )
    return None


def _exists(step: int, name: str, ranks: tuple[int, ...], text: str, cause: str) -> Violation:
    return Violation(
        obligation="gradient",
        step=step,
        role="gradient",
        tensors=(name,),
        ranks=ranks,
        explanation=text,
        causes=(cause,),
    )
