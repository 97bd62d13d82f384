"""Attribution of a gradient that is right, or right times a number, but for other roundings.

A loss that is scaled or weighted before its backward rounds otherwise all the way, so that weights
fit closely and not within the bounds: the backward is run again with that scale. Terms may also be
rounded to a narrower format on their way, or to their sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..diagnose import rounding
from ..diagnose.evidence import Evidence, enclosed_sum, everything
from ..local import Passes
from ..pieces import Enclosing
from .gradient import GradientSearch, inside

CLOSE = 1e-2
"""Weights that are so near to each other may be one scale of all losses."""


def weighted_losses(search: GradientSearch) -> tuple[str, Sequence[int]] | None:
    """Return (operation, numbers of the cells) if losses were weighted as is not declared.

    Only if that explains every cell: weights of few tokens are plain numbers by chance too.
    """
    evidence = search.evidence
    if evidence.otherwise is None or not evidence.case.data.masked:
        return None
    made = _sum(evidence, evidence.otherwise(), evidence.divisor)
    if not all(inside(search.cells[number], made) for number in search.open):
        return None
    if evidence.semantics.weight == "token":
        return "every microbatch counts alike, and not by its number of tokens", search.open
    return "every microbatch counts by its number of tokens, and not alike", search.open


def scaled_losses(search: GradientSearch) -> tuple[str, Sequence[int]] | None:
    """Return (operation, numbers of the cells that it explains) if losses were scaled otherwise."""
    for words, made in _replays(search, _scale(search)):
        explained = [n for n in search.open if inside(search.cells[n], made)]
        if explained:
            return words, explained
    return None


def _scale(search: GradientSearch) -> float | None:
    """Return the weight that all local gradients have about alike, or None."""
    solution = search.solution(search.open, ())
    if solution is None:
        return None
    visible = solution.values[~solution.values.isnan()]
    middle = float(visible.median()) if len(visible) else 0.0
    if middle == 0 or float((visible - middle).abs().max()) > CLOSE * abs(middle):
        return None
    return search.numbers.nearest(middle, CLOSE * abs(middle))


def _replays(search: GradientSearch, scale: float | None) -> Iterator[tuple[str, Enclosing]]:
    evidence = search.evidence
    world = len(evidence.passes.gradients)
    if scale is not None and evidence.again is not None:
        if scale != 1:
            spelled = search.numbers.spelled(scale)
            words = f"every loss counts {spelled}, and its gradient with it"
            for passes in _again(evidence, scale):
                yield words, _sum(evidence, passes, evidence.divisor)
        elif world > 1 and evidence.semantics.average == "mean":
            words = (
                f"every local gradient counts once, and was divided by W = {world} in its loss "
                "and not after the sum"
            )
            for passes in _again(evidence, 1 / world):
                yield words, _sum(evidence, passes, evidence.divisor / world)


def _again(evidence: Evidence, scale: float) -> Iterator[Passes]:
    """Run the backwards of scaled losses: by a product, and by a quotient where that is a number.

    Both round differently.
    """
    assert evidence.again is not None
    inverse = 1 / scale
    if abs(inverse - round(inverse)) < 1e-9 and round(inverse) > 1:
        yield evidence.again(lambda loss: loss / round(inverse))
    yield evidence.again(lambda loss: loss * scale)


def _sum(evidence: Evidence, passes: Passes, divisor: float) -> Enclosing:
    return enclosed_sum(evidence, everything, divisor, given=passes.gradients)


def rounded_terms(search: GradientSearch) -> tuple[str, Sequence[int]] | None:
    """Return (operation, cells) if terms were rounded to a narrower format on their way."""
    wrong = torch.zeros(search.evidence.layout.size, dtype=torch.bool)
    for number in search.open:
        wrong[search.cells[number].positions] = True
    every = search.open
    found: dict[tuple[int, ...], list[str]] = {}
    for candidate in rounding.candidates(search.evidence):
        numbers = tuple(n for n in every if inside(search.cells[n], candidate.enclosures[0]))
        found.setdefault(numbers, []).append(candidate.sentence)
    most = max(found, key=len, default=())
    if most:
        return ", or ".join(dict.fromkeys(found[most])), most
    narrow = [n for n in search.open if _narrow(search, n)]
    for candidate in rounding.reductions(search.evidence, wrong) if narrow else ():
        explained = [n for n in narrow if inside(search.cells[n], candidate.enclosures[0])]
        if explained:
            return f"{candidate.sentence}: it is right to within that round-off", explained
    return None


def _narrow(search: GradientSearch, number: int) -> bool:
    """Return True if most elements, or their sums over ranks, are numbers of bf16 or fp16."""
    values = search.cells[number].values
    for scale in (1.0, float(len(search.evidence.passes.gradients))):
        given = (values * scale).float()
        for dtype in (torch.bfloat16, torch.float16):
            if 2 * int((given == given.to(dtype)).sum()) > len(values):
                return True
    return False
