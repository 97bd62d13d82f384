"""Attribution of a wrong norm: how often each part of the gradient counts in its square.

The square of a right norm is the sum of the squares of all parts, a part being a parameter on the
rank that owns it. A wrong one is looked for as the sum with one more weight: that of a parameter, a
module, several modules of a list, biases or such, on all ranks or on some. The weight follows from
the reported norm, and must be a plain number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ... import causes as bugs
from ...floating_point import U
from ...protocol.verdicts import Explanation
from ..assemble import RoleState
from ..diagnose.clip import sets_of_paths, within
from ..layout import ParameterLayout
from .table import Numbers
from .tensors import numbered, tensors

Squares = Mapping[tuple[int, str], float]
"""Sum of squares of what a rank owns of a parameter, by (rank, name)."""

SEEN = 200.0
"""A part is told apart if it is larger than so many times what the square may be off by: a weight
that is none of a dozen numbers passes for one of them in 2 of 100 parts then."""

MOST_ANSWERS = 2
"""Parts that explain a norm alike. Of more, all may be there by chance."""


def squares(gradient: RoleState, layout: ParameterLayout) -> Squares:
    """Return the sums of squares of each rank's elements; of the first rank that holds them."""
    found: dict[tuple[int, str], float] = {}
    known = torch.zeros(layout.size, dtype=torch.bool)
    for rank, (part, plan) in enumerate(zip(gradient.parts, gradient.plans, strict=True)):
        index = torch.arange(layout.size) if plan.index is None else plan.index
        fresh = ~known[index]
        known[index] = True
        values = torch.zeros(layout.size, dtype=torch.float64)
        values[index[fresh]] = part[: len(index)][fresh].to(torch.float64)
        for place in layout.places:
            square = float((values[place.start : place.stop] ** 2).sum())
            if square:
                found[rank, place.name] = square
    return found


def attribution(
    reported: float,
    parts: Squares,
    layout: ParameterLayout,
    numbers: Numbers,
    relative: float,
    *,
    order: str,
) -> str:
    """Say what a reported norm is, or nothing. relative: error of a right one; order: "2" or "inf".

    Two roundings for the factor are allowed beside that error.
    """
    if not math.isfinite(reported) or not parts:
        return ""
    relative += 4 * U
    total = sum(parts.values())
    exact = math.sqrt(total) if order == "2" else 0.0
    if abs(reported - 1.0) <= relative:
        return "the norm is 1, which is any norm to the power 0"
    if order != "2" or not exact:
        return ""
    for power in (2.0, 0.5, -1.0):
        if abs(reported - exact**power) <= 4 * relative * exact**power:
            return f"the norm is the right one to the power {power:g}"
    found: dict[float, str] = {}
    error = 2 * relative * reported**2
    for names, ranks in _sets(parts):
        part = sum(parts[key] for key in parts if key[0] in ranks and key[1] in names)
        if part <= SEEN * error or any(math.isclose(part, other, rel_tol=1e-9) for other in found):
            continue
        weight = 1 + (reported**2 - total) / part
        near = numbers.nearest(weight, error / part)
        if near >= 0 and (near in (0.0, 0.5, 2.0) or near in numbers.named):
            every = len(ranks) == len({rank for rank, _ in parts})
            where = "" if every else f" on {numbered(sorted(ranks), 'rank')}"
            words = "is left out" if near == 0 else f"counts {numbers.spelled(near)}"
            found[part] = f"that of the gradient of {tensors(names, layout)}{where} {words}"
    if not 0 < len(found) <= MOST_ANSWERS:
        return ""
    return f"in the square of the norm, {', or '.join(found.values())}"


def _sets(parts: Squares) -> Iterator[tuple[frozenset[str], frozenset[int]]]:
    """Iterate over (parameters, ranks) whose squares may have a weight of their own.

    On all ranks first, and those of few words first.
    """
    ranks = sorted({rank for rank, _ in parts})
    groups = [frozenset(ranks)]
    if len(ranks) > 1:
        groups += [frozenset((rank,)) for rank in ranks]
    if len(ranks) > 2:
        groups += [frozenset(ranks).difference((rank,)) for rank in ranks]
    names = list(_names(list(dict.fromkeys(name for _, name in parts))))
    for group in groups:
        for some in names:
            yield some, group


def _names(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Iterate over sets of parameters: all, one, modules, several modules of one list, kinds."""
    yield frozenset(names)
    yield from (within(paths, names) for paths in sets_of_paths(names))
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda name: name.endswith("bias"),
        lambda name: ".norm." in name,
        lambda name: ".experts." in name,
        lambda name: ".experts.mlps." in name,
    )
    yield from (frozenset(filter(kind, names)) for kind in kinds)


def by_coefficients(
    clipped: RoleState,
    gradient: RoleState,
    layout: ParameterLayout,
    coefficient: Callable[[float], float],
    relative: float,
) -> Explanation:
    """Say which tensors a clipped gradient has multiplied by which coefficient, or nothing.

    coefficient: of a norm; relative: error of a norm. Tensors of one coefficient belong together;
    where it is that of the norm of these alone, that is the cause.
    """
    eta = max(format.eta for format, _ in layout.formats.parts)
    ratios: list[tuple[float, list[str], float]] = []
    for place in layout.places:
        before = gradient.whole[place.start : place.stop].to(torch.float64)
        after = clipped.whole[place.start : place.stop].to(torch.float64)
        square = float((before * before).sum())
        if not square or not math.isfinite(square):
            continue
        ratio = float((before * after).sum()) / square
        error = float((after - ratio * before).abs().max())
        if not error <= 8 * U * float(after.abs().max()) + eta:
            return Explanation("")
        for number, (other, names, sum_) in enumerate(ratios):
            if abs(ratio - other) <= 1e-5 * abs(other):
                ratios[number] = (other, [*names, place.name], sum_ + square)
                break
        else:
            ratios.append((ratio, [place.name], square))
    if len(ratios) < 2:
        return Explanation("")
    own = all(
        abs(coefficient(math.sqrt(square)) - ratio) <= (relative + 1e-5) * abs(ratio)
        for ratio, _, square in ratios
    )
    words = "; ".join(
        f"the gradient of {tensors(names, layout)} is multiplied by {ratio:.6g}"
        for ratio, names, _ in ratios[:4]
    )
    if own:
        return Explanation(
            f"{words}, each the coefficient of their own norm", (bugs.CLIPPED_IN_PARTS,)
        )
    return Explanation(words)
