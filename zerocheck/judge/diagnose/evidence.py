"""Inputs and results of a counterfactual of a wrong gradient, shared by its candidates.

Candidates are compared piece by piece (see pieces.py), and nothing as large as all local gradients
is allocated in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...case.schema import Case
from ...contract.semantics import Semantics
from ...floating_point import Enclosure, Format
from .. import bounds
from ..assemble import RoleState
from ..compare import compare
from ..flat import FlatBuffer
from ..layout import Formats, ParameterLayout
from ..local import Passes, Scale
from ..pieces import Enclosing, Positions, pieces, some
from ..precision import declared, narrowest


class Evidence(NamedTuple):
    """Evidence for the counterfactuals of one wrong gradient.

    right: the enclosure of the right gradient; again(scale): the local gradients if each loss were
    scaled so before its backward; previous: the gradient that the implementation held at the end of
    the step before; otherwise(): the local gradients, weighted by tokens if the semantics do not
    say so, and the other way round; added_in(dtype): those if what the uses of a parameter give
    were added in that dtype; redrawn(): those of blocks that are computed again with other random
    numbers; past_wrapper(factor): those with that factor on what a loss takes past the wrapper;
    loss_scale: that of the step; buffers: the flat buffers of the
    implementation; unclipped_before: what the step before reduced, if it was clipped then; alike:
    every forward left the random state that one of another rank left.
    """

    held: RoleState
    passes: Passes
    right: Enclosing
    layout: ParameterLayout
    case: Case
    semantics: Semantics
    again: Callable[[Scale], Passes] | None = None
    previous: torch.Tensor | None = None
    otherwise: Callable[[], Passes] | None = None
    added_in: Callable[[torch.dtype], Passes] | None = None
    redrawn: Callable[[], Passes] | None = None
    past_wrapper: Callable[[float], Passes] | None = None
    loss_scale: float = 1.0
    buffers: Sequence[FlatBuffer] = ()
    unclipped_before: torch.Tensor | None = None
    alike: bool = False
    noise: torch.Tensor | float = 0.0
    """Per element, what the sum of all local gradients can be off, where they are not known to the
    bit; it is in the enclosure already."""
    axes: Mapping[str, int] = MappingProxyType({})
    """Sizes of axes of a job's mesh that split sequences or experts, by their names."""

    @property
    def enclosure(self) -> Enclosure:
        """Enclosure of the right gradient, as a whole."""
        return self.right.whole

    @property
    def formats(self) -> Formats:
        """Formats in which gradients are added and divided."""
        if not declared(self.semantics):
            return self.layout.formats
        return Formats(((narrowest(self.semantics), None),), self.layout.size)

    @property
    def finite(self) -> bool:
        """True if the right gradient is finite everywhere."""
        return all(bool(exact.isfinite().all()) for exact in self.right.exact())

    @property
    def divisor(self) -> float:
        """Divisor of the sum of all local gradients."""
        world, count = self.passes.gradients.shape[:2]
        divisor = float(world) if self.semantics.average == "mean" else 1.0
        return divisor * (count if self.semantics.divide == "gradient" else 1)


class Candidate(NamedTuple):
    """Gradient that a known cause would give: one enclosure for all ranks, or one per rank."""

    name: str
    sentence: str
    enclosures: list[Enclosing]
    joint: str = ""


def sentences_of(candidates: Iterable[Candidate]) -> dict[str, str]:
    """Return what each cause says, by cause: a cause may be that of several candidates."""
    sentences: dict[str, dict[str, None]] = {}
    for candidate in candidates:
        sentences.setdefault(candidate.name, {})[candidate.sentence] = None
    return {name: "; or ".join(each) for name, each in sentences.items()}


def enclosing(evidence: Evidence, make: Callable[[Positions | None], Enclosure]) -> Enclosing:
    """Make enclosures that are computed piece by piece; make(positions): those of the positions."""
    return Enclosing(evidence.layout.size, make)


def times(evidence: Evidence, factor: float | torch.Tensor, widened: float = 0.0) -> Enclosing:
    """Scale an enclosure; a division left out or made twice rounds twice: 4 u.

    factor: one, or float64 of the size of the flat vector; widened: by so much of the result.
    """

    def at(positions: Positions | None) -> Enclosure:
        exact, bound = evidence.right.at(positions)
        factors = some(factor, positions) if isinstance(factor, torch.Tensor) else factor
        exact, bound = exact * factors, bound * factors
        bound = bound + slack(evidence, 4, exact.abs(), positions)
        return Enclosure(exact, bound + widened * exact.abs() if widened else bound)

    return enclosing(evidence, at)


def slack(
    evidence: Evidence, roundings: int, size: torch.Tensor, positions: Positions | None = None
) -> torch.Tensor:
    """Return `roundings` u of the size and eta, in each element's own format.

    size: of the elements at these positions, None: of all.
    """

    def enclosure(size: torch.Tensor, format: Format) -> Enclosure:
        return Enclosure(size, roundings * (format.u * size + format.eta))

    formats = evidence.formats.at(positions)
    return formats.enclose(enclosure, size.to(torch.float64)).bound


Vectors = Mapping[str, torch.Tensor]
"""Flat vectors that a wrong gradient may be made of as well, by their names in words."""
Terms = Callable[[torch.Tensor], torch.Tensor]
"""From the local gradients, (ranks, microbatches, elements) in float64, to those that were summed:
any shape with the elements last."""


def enclosed_sum(
    evidence: Evidence,
    terms: Terms,
    divisor: float,
    *,
    given: torch.Tensor | None = None,
    exactly_given: bool = False,
    added_in: Format | None = None,
) -> Enclosing:
    """Enclose a sum of other terms: the roundings of their additions, and 4 of the divisions.

    added_in: the format of these, None for the one in which gradients are added.

    given: other local gradients than those of the evidence; exactly_given: `terms` takes them in
    their own dtype.
    """
    gradients = evidence.passes.gradients if given is None else given

    def at(positions: Positions | None) -> Enclosure:
        local = some(gradients, positions)
        made = terms(local if exactly_given else local.to(torch.float64)).to(torch.float64)
        flat = made.reshape(-1, made.shape[-1])
        roundings = 2 * len(flat) + 4

        def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
            return bounds.gradient(exact, absolute, roundings, format)

        formats = evidence.formats
        if added_in is not None:
            formats = Formats(((added_in, None),), evidence.layout.size)
        exact, bound = formats.at(positions).enclose(
            enclosure, flat.sum(0) / divisor, flat.abs().sum(0) / divisor
        )
        noise = evidence.noise
        if isinstance(noise, torch.Tensor):
            noise = some(noise, positions)
        return Enclosure(exact, bound + noise / divisor)

    return enclosing(evidence, at)


def weighted(
    evidence: Evidence,
    weights: torch.Tensor,
    others: Mapping[str, float] = MappingProxyType({}),
    known: Vectors = MappingProxyType({}),
) -> Enclosing:
    """Enclose a weighted sum of local gradients and other vectors, as a right sum is enclosed.

    weights: (ranks, microbatches) in float64, in units of the right ones; others: the weight of
    each other vector, by its name; known: these vectors. Two roundings for each term, and 4 of the
    divisions.
    """
    shares = (weights / evidence.divisor).unsqueeze(-1)
    largest = max(1.0, float(weights.abs().max()))

    def at(positions: Positions | None) -> Enclosure:
        terms = some(evidence.passes.gradients, positions).to(torch.float64) * shares
        terms = terms.where(shares != 0, 0.0)  # an overflow of one that does not count
        terms = terms.reshape(-1, terms.shape[-1])
        extra = [
            some(known[name], positions).to(torch.float64) * weight
            for name, weight in others.items()
        ]
        if extra:
            terms = torch.cat([terms, torch.stack(extra)])
        exact, bound = enclosed_terms(evidence, terms, positions)
        noise = evidence.noise
        if isinstance(noise, torch.Tensor):
            noise = some(noise, positions)
        return Enclosure(exact, bound + largest * noise / evidence.divisor)

    return enclosing(evidence, at)


def enclosed_terms(
    evidence: Evidence, terms: torch.Tensor, positions: Positions | None
) -> Enclosure:
    """Enclose a sum of terms (terms, elements) in the formats of these positions."""
    roundings = 2 * len(terms) + 4

    def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
        return bounds.gradient(exact, absolute, roundings, format)

    formats = evidence.formats.at(positions)
    return formats.enclose(enclosure, terms.sum(0), terms.abs().sum(0))


def everything(terms: torch.Tensor) -> torch.Tensor:
    """Return the terms unchanged."""
    return terms


def explains(candidate: Candidate, evidence: Evidence, wrong: torch.Tensor) -> bool:
    """Return True if every wrong tensor of every rank lies in the candidate's enclosure."""
    held = evidence.held
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        made = candidate.enclosures[rank if len(candidate.enclosures) > 1 else 0]
        for here, there in pieces(plan.index, evidence.layout.size):
            asked = wrong[there]
            if not bool(asked.any()):
                continue
            exact, bound = made.at(there)
            enclosure = Enclosure(exact[asked], bound[asked])
            if compare(part[here][asked], enclosure)[1] is not None:
                return False
    return True


def wrong_tensors(evidence: Evidence) -> torch.Tensor:
    """Mask of all elements of the parameters in which something is outside."""
    mask = torch.zeros(evidence.layout.size, dtype=torch.bool)
    for part, plan in zip(evidence.held.parts, evidence.held.plans, strict=True):
        for here, there in pieces(plan.index, evidence.layout.size):
            _, misfit = compare(part[here], evidence.right.at(there))
            if misfit is None:
                continue
            if isinstance(there, slice):
                mask[there] |= misfit.outside
            else:
                mask[there[misfit.outside]] = True
    return evidence.layout.spread(
        [bool(mask[place.start : place.stop].any()) for place in evidence.layout.places]
    )
