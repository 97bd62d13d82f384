"""Causes of a wrong gradient in which ranks are left out, or did not wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from math import isfinite
from operator import itemgetter

import torch

from ... import causes as bugs
from ...floating_point import ETA
from ...protocol.verdicts import Explanation
from ..layout import ParameterPlace
from ..pieces import pieces
from .evidence import Candidate, Evidence, enclosed_sum, everything, explains, times, weighted

MOST_TERMS = 12
"""Local gradients of one step, over ranks and microbatches, whose subsets are all tried."""


AT_ONCE = 1 << 20
"""Elements of sums that are computed at once: 8 MB."""


def averaged_over_users(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over gradients that are means over the ranks with a gradient of the parameter."""
    world = len(evidence.passes.gradients)
    if world == 1 or evidence.semantics.average != "mean":
        return
    for words, users in (
        ("have one that is not 0", _ranks_with_values(evidence)),
        ("used the parameter", evidence.passes.used.sum(0).tolist()),
    ):
        if all(count in (0, world) for count in users):
            continue
        factor = torch.ones(evidence.layout.size, dtype=torch.float64)
        for place, count in zip(evidence.layout.places, users, strict=True):
            factor[place.start : place.stop] = world / max(1, count)
        yield Candidate(
            bugs.AVERAGED_OVER_USERS,
            f"the gradient is averaged over the ranks that {words}, and not over all {world}",
            [times(evidence, factor)],
        )


def _ranks_with_values(evidence: Evidence) -> list[int]:
    """Count, per parameter, the ranks that have a gradient with a non-zero element."""
    return [
        int(evidence.passes.gradients[..., place.start : place.stop].ne(0).any(2).any(1).sum())
        for place in evidence.layout.places
    ]


def left_out(evidence: Evidence, wrong: torch.Tensor) -> Explanation | None:
    """Return the explanation if each wrong tensor is the sum without some local gradients.

    Asked only if no candidate with a reason explains it: other tensors may lack other ones.
    """
    world, count = evidence.passes.gradients.shape[:2]
    if world == 1 or world * count > MOST_TERMS:
        return None
    terms = evidence.passes.gradients.reshape(world * count, -1)
    subsets = torch.tensor(list(product((0.0, 1.0), repeat=world * count)), dtype=torch.float64)
    lacking: set[tuple[int, int]] = set()
    first = ""
    for place in evidence.layout.places:
        if place.start == place.stop or not bool(wrong[place.start]):
            continue
        found = _subset(evidence, terms, subsets, place)
        if found is None:
            return None
        here = {divmod(n, count) for n, weight in enumerate(found.tolist()) if not weight}
        if len({rank for rank, _ in here}) == world:
            return None  # what every rank lacks is no matter of ranks
        lacking |= here
        first = first or place.name
    if not lacking:
        return None
    ranks = sorted({rank for rank, _ in lacking})
    words = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    text = f"the gradient that {words} computed is missing from the sum"
    return Explanation(text, (bugs.RANKS_LEFT_OUT,))


def _subset(
    evidence: Evidence, terms: torch.Tensor, subsets: torch.Tensor, place: ParameterPlace
) -> torch.Tensor | None:
    """Return the weights, 0 or 1, of the partial sum that every rank has here, or None."""
    part = slice(place.start, place.stop)
    here = terms[:, part].to(torch.float64)
    whole = evidence.held.whole[part].to(torch.float64)
    # A partial sum has no wider bound than the whole one. One element rules most subsets out.
    most = enclosed_sum(evidence, everything, evidence.divisor).at(part).bound
    clearest = int(here.abs().sum(0).argmax())
    distance = (subsets @ here[:, clearest] / evidence.divisor - whole[clearest]).abs()
    left = subsets[distance <= most[clearest]]
    this = evidence.layout.spread([place is one for one in evidence.layout.places])
    rows = max(1, AT_ONCE // len(whole))
    for first in range(0, len(left), rows):
        some = left[first : first + rows]
        near = ((some @ here / evidence.divisor - whole).abs() <= most).all(1)
        for weights in some[near].unbind():
            table = weights.view(evidence.passes.gradients.shape[:2])
            made = Candidate("", "", [weighted(evidence, table)])
            if explains(made, evidence, this):
                return weights
    return None


CLEAR = 1e4
"""Size over bound of an element that a ratio is taken of, so that round-off hardly moves it."""


def scaled_on_some(evidence: Evidence, wrong: torch.Tensor) -> Explanation | None:
    """Return the explanation if some ranks have all wrong elements times one number.

    The others have some of them, and are right. Where the number is that of ranks, the mean may not
    be taken yet.
    """
    ratios: dict[int, float] = {}
    right = False
    for rank in range(len(evidence.held.parts)):
        found = _ratio_on(evidence, wrong, rank)
        if found is None:
            return None
        right |= found == 1.0
        if found not in (0.0, 1.0):
            ratios[rank] = found
    if not (ratios and right):
        return None
    first = next(iter(ratios.values()))
    if any(abs(one - first) > abs(first) / CLEAR for one in ratios.values()):
        return None
    ranks = "rank" + ("s " if len(ratios) > 1 else " ") + ", ".join(map(str, ratios))
    words = f"on {ranks} alone the gradient is {first:.6g} times what it must be"
    if evidence.semantics.average == "mean" and round(first, 3) == len(evidence.held.parts):
        alone = {bugs.GRADIENT_SCALED: words, bugs.REDUCTION_NOT_WAITED_FOR: f"{words}: {LATE}"}
        return Explanation(f"{words}; or {LATE}", tuple(alone), alone)
    return Explanation(words, (bugs.GRADIENT_SCALED,))


def _ratio_on(evidence: Evidence, wrong: torch.Tensor, rank: int) -> float | None:
    """Return the number that makes wrong elements of the right ones on a rank.

    1.0 if they are right there, 0.0 if it has none of them; None if there is no such number, or too
    little to tell.
    """
    part, plan = evidence.held.parts[rank], evidence.held.plans[rank]
    places = [
        (part[here].to(torch.float64), there, wrong[there])
        for here, there in pieces(plan.index, evidence.layout.size)
        if part[here].numel()  # a rank may have no elements
    ]
    right, known, clearest = True, 0, 0.0
    ratio = uncertain = 0.0
    for values, there, asked in places:
        exact, bound = evidence.right.at(there)
        right &= bool(((values - exact).abs() <= bound)[asked].all())
        known += int((asked & (exact.abs() > bound)).sum())
        clarity = torch.where(asked, exact.abs() / bound.clamp(min=ETA), 0.0)
        best = int(clarity.argmax())
        if float(clarity[best]) > clearest:
            clearest = float(clarity[best])
            ratio = float(values[best] / exact[best])
            uncertain = 2 / clearest
    if right:
        return 1.0 if any(bool(asked.any()) for _, _, asked in places) else 0.0
    if known < 2 or clearest < CLEAR or ratio == 0 or not isfinite(ratio):
        return None
    scaled = times(evidence, abs(ratio), uncertain)
    for values, there, asked in places:
        exact, bound = scaled.at(there)
        signed = exact if ratio > 0 else -exact
        if bool(((values - signed).abs() > bound)[asked].any()):
            return None
    return ratio


LATE = "the reduction was not over when its result was used"
EARLY = "the sum with the rank's own part divided by W before it was read"


def could_be_raced(evidence: Evidence, causes: Collection[str]) -> bool:
    """Return True if ranks were delayed, so that a state of all elements may be a race."""
    return bool(evidence.case.disturbance.delay) and bool(
        {bugs.LOCAL_GRADIENT_ONLY, bugs.LOCAL_GRADIENT_OVER_W, bugs.GRADIENT_TIMES_W} & set(causes)
    )


def raced(evidence: Evidence, wrong: torch.Tensor) -> Explanation | None:
    """Return the explanation if the elements are those of a race with the reduction.

    Some elements are from before the reduction, others are not divided, and others may be right.

    An element that is neither right nor the rank's own was read in between: the reduction was not
    waited for. Otherwise the wait may also have been left out.

    Used only if no candidate explains all elements alike.
    """
    world = len(evidence.passes.gradients)
    if world == 1:
        return None
    divide = evidence.divisor / (world if evidence.semantics.average == "mean" else 1)
    kinds: set[str] = set()
    for rank, (part, plan) in enumerate(zip(evidence.held.parts, evidence.held.plans, strict=True)):
        local = itemgetter(rank)
        early = torch.ones(evidence.passes.gradients.shape[:2], dtype=torch.float64)
        early[rank] = 1 / world
        states = {
            "right": evidence.right,
            "the rank's own": enclosed_sum(evidence, local, divide),
            "the rank's own divided by W": enclosed_sum(evidence, local, divide * world),
            "the sum over ranks, not divided": enclosed_sum(evidence, everything, divide),
            EARLY: weighted(evidence, early),
        }
        for here, there in pieces(plan.index, evidence.layout.size):
            asked = wrong[there]
            values = part[here][asked].to(torch.float64)
            left = torch.ones(len(values), dtype=torch.bool)
            for kind, made in states.items():
                exact, bound = made.at(there)
                fits = left & ((values - exact[asked]).abs() <= bound[asked])
                if bool(fits.any()):
                    kinds.add(kind)
                left &= ~fits
            if bool(left.any()):
                return None
    if len(kinds) < 2 and EARLY not in kinds:
        return None
    words = f"elements are {', others are '.join(sorted(kinds))}"
    sentences = {bugs.REDUCTION_NOT_WAITED_FOR: LATE}
    if kinds <= {"right", "the rank's own", "the rank's own divided by W"}:
        sentences = {bugs.PART_NOT_REDUCED: "part of a tensor is never reduced", **sentences}
    return Explanation.of(sentences, sentences, words, ": ")
