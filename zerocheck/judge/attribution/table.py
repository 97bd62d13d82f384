"""Table of weights: the linear combination of known vectors that an observed vector is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch

MOST_ROWS = 4096
"""Elements from which weights are solved for. Every element is compared with the result."""

VISIBLE = 8.0
"""A term counts if it is larger than so many bounds somewhere; its weight is unknown else."""


class Table(NamedTuple):
    """Weights of local gradients and of other vectors in a gradient. 1 is right for the former."""

    weights: torch.Tensor
    """(ranks, microbatches) in float64, in units of the right weight. NaN: it cannot be seen."""
    others: Mapping[str, float] = {}
    """Weight of each other vector, by its name in words. 0 is right."""

    @property
    def filled(self) -> torch.Tensor:
        """Weights, with the right one where it cannot be seen."""
        return self.weights.nan_to_num(nan=1.0)

    @property
    def right(self) -> bool:
        """True if nothing is wrong in it."""
        return not self.others and bool((self.filled == 1).all())

    def agrees(self, weights: torch.Tensor) -> bool:
        """Return True if these are the weights, where they can be seen, and there is nothing else.

        weights: (ranks, microbatches) or what broadcasts to it.
        """
        same = torch.isclose(self.weights, weights.to(torch.float64), rtol=1e-6, atol=1e-9)
        return not self.others and bool((same | self.weights.isnan()).all())

    def fits(self, other: Table) -> bool:
        """Return True if two tables have the same weights where both can be seen."""
        return self.others == other.others and self._same(other.weights)

    def _same(self, weights: torch.Tensor) -> bool:
        """Return True if these are the weights, where both can be seen."""
        same = torch.isclose(self.weights, weights, rtol=1e-6, atol=1e-9)
        return bool((same | self.weights.isnan() | weights.isnan()).all())

    def joined(self, other: Table) -> Table:
        """Return the weights that one of two tables shows."""
        weights = torch.where(self.weights.isnan(), other.weights, self.weights)
        return Table(weights, self.others)


class Solution(NamedTuple):
    """Solved weights."""

    values: torch.Tensor
    """(terms,), NaN where a term cannot be seen."""
    uncertain: torch.Tensor
    """(terms,): how far each can be off, given that each element is off by its bound at most."""
    residual: float
    """Largest distance of an element, in bounds."""

    def nearest(self, numbers: Numbers, scale: float = 1.0) -> list[float]:
        """Return the plain number near to each weight, or the weight itself; NaN stays.

        scale: of the errors of elements, in bounds.
        """
        return [
            value if value != value else numbers.nearest(value, scale * uncertain)
            for value, uncertain in zip(self.values.tolist(), self.uncertain.tolist(), strict=True)
        ]


def solve(terms: torch.Tensor, observed: torch.Tensor, bound: torch.Tensor) -> Solution | None:
    """Solve for the weights of terms in a vector, by least squares in units of the bounds.

    terms: (terms, elements), observed, bound: (elements,), all float64. None where the terms are
    not independent, as with fewer elements than terms, and where something is not finite.

    The weights are P y with the pseudoinverse P of the terms; an error of at most 1 bound in each
    element of y moves weight k by at most the sum of |P_ki|, which is `uncertain`.
    """
    if not terms.numel():
        return None
    unit = bound.clamp(min=torch.finfo(torch.float64).tiny)
    scaled, wanted = terms / unit, observed / unit
    if not (bool(scaled.isfinite().all()) and bool(wanted.isfinite().all())):
        return None
    visible = scaled.abs().amax(1) > VISIBLE
    count = int(visible.sum())
    if not count or count > scaled.shape[1]:
        return None
    matrix = scaled[visible].t()
    size = matrix.norm(dim=0)
    left, singular, right = torch.linalg.svd(matrix / size, full_matrices=False)
    if float(singular[-1]) < 1e-10 * float(singular[0]):
        return None
    inverse = (right.t() / singular) @ left.t() / size.unsqueeze(1)
    values = inverse @ wanted
    residual = float((matrix @ values - wanted).abs().max())
    found = torch.full((len(terms),), math.nan, dtype=torch.float64)
    uncertain = torch.zeros(len(terms), dtype=torch.float64)
    found[visible], uncertain[visible] = values, inverse.abs().sum(1)
    return Solution(found, uncertain, residual)


def rows(count: int) -> torch.Tensor | slice:
    """Return the elements of a vector of this length from which weights are solved for."""
    if count <= MOST_ROWS:
        return slice(None)
    return torch.linspace(0, count - 1, MOST_ROWS, dtype=torch.float64).long()


class Numbers:
    """Weights that have a name: products and quotients of the numbers of a case."""

    def __init__(self, numbers: Mapping[str, int | float]) -> None:
        """Make them of the numbers of a case by symbol, such as W = 4 and GA = 2."""
        named: dict[float, list[str]] = {}

        def add(value: float, name: str) -> None:
            known = next((one for one in named if math.isclose(one, value, rel_tol=1e-9)), value)
            named.setdefault(known, []).append(name)

        self.numbers = {name: value for name, value in numbers.items() if value != 1}
        for name, value in self.numbers.items():
            add(value, name)
            add(1 / value, f"1/{name}")
            add(math.sqrt(value), f"sqrt({name})")
            add(1 / math.sqrt(value), f"1/sqrt({name})")
        for (one, first), (other, second) in product(self.numbers.items(), repeat=2):
            if one < other:
                add(first * second, f"{one} {other}")
                add(1 / (first * second), f"1/({one} {other})")
            if one != other:
                add(first / second, f"{one}/{other}")
            else:
                add(1 / first**2, f"1/{one}^2")
                add(1 / first**3, f"1/{one}^3")
        self.named = named
        plain = [0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 1 / 3, 4.0, 0.25, 1.5, -2.0, -0.5]
        self.values = torch.tensor(
            [*plain, *(one for one in named if one not in plain)], dtype=torch.float64
        )

    def nearest(self, value: float, uncertain: float) -> float:
        """Return the number that it is within its uncertainty, or the value itself."""
        distance = (self.values - value).abs()
        at = int(distance.argmin())
        return float(self.values[at]) if float(distance[at]) <= uncertain + 1e-9 else value

    def plain(self, value: float) -> bool:
        """Return True if it is one of the numbers."""
        return bool((self.values == value).any())

    def spelled(self, value: float) -> str:
        """Return a weight in words: "2 times (W = GA = 2)", "once", "0 times"."""
        if value == 0:
            return "0 times"
        if value == 1:
            return "once"
        names = next((n for v, n in self.named.items() if math.isclose(v, value, rel_tol=1e-9)), [])
        plain = f"{value:.6g}"
        return f"{plain} times" + (f" ({' = '.join(names)} = {plain})" if names else "")
