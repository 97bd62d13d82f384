"""What a counterfactual of a wrong gradient needs, and what it gives: shared by its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...case.schema import Case
from ...contract.semantics import Semantics
from .. import bounds
from ..assemble import Held
from ..bounds import Enclosure, Format
from ..compare import compare
from ..flat import FlatBuffer
from ..layout import Layout
from ..local import Passes, Scale


class Evidence(NamedTuple):
    """All that a counterfactual needs.

    again(scale): the local gradients if each loss were scaled so before its backward; previous:
    the gradient that the implementation held at the end of the step before; otherwise(): the local
    gradients, weighted by tokens if the semantics do not say so, and the other way round;
    loss_scale: that of the step; buffers: the flat buffers of the implementation;
    unclipped_before: what the step before reduced, if it was clipped then; alike: every forward
    left the random state that one of another rank left.
    """

    held: Held
    passes: Passes
    enclosure: Enclosure
    layout: Layout
    case: Case
    semantics: Semantics
    again: Callable[[Scale], Passes] | None = None
    previous: torch.Tensor | None = None
    otherwise: Callable[[], Passes] | None = None
    loss_scale: float = 1.0
    buffers: Sequence[FlatBuffer] = ()
    unclipped_before: torch.Tensor | None = None
    alike: bool = False
    noise: torch.Tensor | float = 0.0
    """Per element, what the sum of all local gradients can be off, where they are not known to the
    bit; it is in the enclosure already."""

    @property
    def divisor(self) -> float:
        """What the sum of all local gradients is divided by."""
        world, count = self.passes.gradients.shape[:2]
        divisor = float(world) if self.semantics.average == "mean" else 1.0
        return divisor * (count if self.semantics.divide == "gradient" else 1)


class Candidate(NamedTuple):
    """What a known cause would have given: one enclosure for all ranks, or one per rank."""

    name: str
    sentence: str
    enclosures: list[Enclosure]


def times(evidence: Evidence, factor: float) -> Enclosure:
    """A scaled enclosure; the division that was left out or made twice rounds twice: 4 u."""
    exact = evidence.enclosure.exact * factor
    return Enclosure(exact, evidence.enclosure.bound * factor + slack(evidence, 4, exact.abs()))


def slack(evidence: Evidence, roundings: int, size: torch.Tensor) -> torch.Tensor:
    """So many u of the size, and as many of the smallest number, in each element's own format."""

    def own(size: torch.Tensor, format: Format) -> Enclosure:
        return Enclosure(size, roundings * (format.u * size + format.eta))

    return evidence.layout.formats.enclose(own, size.to(torch.float64)).bound


def summed(evidence: Evidence, terms: torch.Tensor, divisor: float) -> Enclosure:
    """A sum of other terms: roundings of their additions, and of the divisions: 4."""
    flat = terms.reshape(-1, terms.shape[-1])
    roundings = 2 * len(flat) + 4

    def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
        return bounds.gradient(exact, absolute, roundings, format)

    found = evidence.layout.formats.enclose(
        enclosure, flat.sum(0) / divisor, flat.abs().sum(0) / divisor
    )
    return Enclosure(found.exact, found.bound + evidence.noise / divisor)


def explains(candidate: Candidate, evidence: Evidence, wrong: torch.Tensor) -> bool:
    """Whether every wrong tensor of every rank lies within what the candidate would have given."""
    held = evidence.held
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        exact, bound = candidate.enclosures[rank if len(candidate.enclosures) > 1 else 0]
        here = plan.gather(wrong)
        enclosure = Enclosure(plan.gather(exact)[here], plan.gather(bound)[here])
        if compare(part[here], enclosure)[1] is not None:
            return False
    return True


def wrong_tensors(evidence: Evidence) -> torch.Tensor:
    """Mask of all elements of the parameters in which something is outside."""
    mask = torch.zeros(evidence.layout.size, dtype=torch.bool)
    exact, bound = evidence.enclosure
    for part, plan in zip(evidence.held.parts, evidence.held.plans, strict=True):
        _, misfit = compare(part, Enclosure(plan.gather(exact), plan.gather(bound)))
        if misfit is None:
            continue
        if plan.index is None:
            mask |= misfit.outside
        else:
            mask[plan.index[misfit.outside]] = True
    return evidence.layout.spread(
        [bool(mask[place.start : place.stop].any()) for place in evidence.layout.places]
    )
