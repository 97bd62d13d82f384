"""Attribution of a wrong update: the edit of the optimizer's equation that gives what was observed.

An equation is a sum of terms with coefficients. The grammar of edits: one input is replaced by
another that exists, one operation is moved, and the coefficients are others. Coefficients are
solved for, and must be numbers that the options of the optimizer give. The fewest edits win; where
several explain all elements, each is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import torch

from ...floating_point import Enclosure
from ...optimizers.specification import Equation, Segment, UpdateRule
from ..compare import compare
from .table import rows, solve

MOST_ANSWERS = 8
"""Explanations that a sentence names."""

ROUNDINGS = 16
"""Roundings that a term of an edited equation has at most: AdamW's update has 10, and an edit adds
a product, a sum and a root at most, which may be taken in another order."""

MOST_CHOICES = 4096
"""Choices of coefficients that are tried for one equation."""


class Edit(NamedTuple):
    """Edited equation that gives what was observed."""

    replaced: str
    changed: tuple[tuple[str, str, str], ...]
    """(term, coefficient that it has, coefficient that is right), in words."""

    @property
    def size(self) -> int:
        """Number of edits."""
        return bool(self.replaced) + len(self.changed)

    @property
    def words(self) -> str:
        """The edit as a clause."""
        parts = [self.replaced] if self.replaced else []
        parts += [
            f"{term} counts {given}, where {right} is right" for term, given, right in self.changed
        ]
        return ", and ".join(parts)


def edits(optimizer: UpdateRule, segments: Sequence[Segment]) -> list[Edit]:
    """Return the smallest edits that explain every element of all segments."""
    if not segments:
        return []
    found: list[Edit] = []
    bounds = [_bound(optimizer, one) for one in segments]
    for number, equation in enumerate(optimizer.equations(segments[0])):
        for edit, values in _edits(segments[0], equation, bounds[0]):
            if found and edit.size > found[0].size:
                continue
            others = zip(segments[1:], bounds[1:], strict=True)
            if all(_holds(optimizer, one, number, values, bound) for one, bound in others):
                if found and edit.size < found[0].size:
                    found = []
                if edit.words not in {one.words for one in found}:
                    found.append(edit)
    return found[:MOST_ANSWERS]


def reruns(optimizer: UpdateRule, segments: Sequence[Segment]) -> list[str]:
    """Return in words with which change a further run gives every element of all segments."""
    fitting: Counter[str] = Counter()
    for segment in segments:
        for words, enclosure in optimizer.reruns(segment):
            fitting[words] += compare(segment.observed, enclosure)[1] is None
    return [words for words, count in fitting.items() if count == len(segments)][:MOST_ANSWERS]


def _edits(
    segment: Segment, equation: Equation, bound: torch.Tensor
) -> Iterator[tuple[Edit, dict[str, float]]]:
    """Iterate over (edit, coefficients) with which an equation gives what the segment observed."""
    slack = _slack(segment, equation, bound)
    choices = [_choices(equation, interval) for interval in _solved(segment, equation, slack)]
    for chosen in islice(product(*choices), MOST_CHOICES):
        values = {term: value for term, (_, value) in zip(equation.terms, chosen, strict=True)}
        changed = tuple(
            (term, name, _name(equation, term, equation.right[term]))
            for term, (name, value) in zip(equation.terms, chosen, strict=True)
            if value != equation.right[term]
        )
        edit = Edit(equation.replaced, changed)
        if edit.size and _inside(segment, equation, values, slack):
            yield edit, values


Interval = tuple[str, float, float]
"""(term, lowest coefficient, highest)."""


def _solved(segment: Segment, equation: Equation, slack: torch.Tensor) -> list[Interval]:
    """Return the interval of each term's coefficient, all numbers where they cannot be solved."""
    terms = torch.stack(tuple(equation.terms.values()))
    chosen = rows(terms.shape[1])
    terms, observed, slack = terms[:, chosen], segment.observed[chosen], slack[chosen]
    solution = solve(terms, observed, slack)
    if solution is not None:
        # What the terms are rounded by depends on their coefficients.
        size = (solution.values.nan_to_num(nan=0.0).unsqueeze(1) * terms).abs().sum(0)
        slack = slack + ROUNDINGS * segment.elements.format.u * size
        solution = solve(terms, observed, slack)
    if solution is None:
        return [(term, -torch.inf, torch.inf) for term in equation.terms]
    found: list[Interval] = []
    for term, value, uncertain in zip(
        equation.terms, solution.values.tolist(), solution.uncertain.tolist(), strict=True
    ):
        known = value == value
        found.append(
            (term, value - 2 * uncertain, value + 2 * uncertain)
            if known
            else (term, -torch.inf, torch.inf)
        )
    return found


def _choices(equation: Equation, interval: Interval) -> list[tuple[str, float]]:
    """Return the named coefficients of a term that lie in an interval, the right one first."""
    term, low, high = interval
    right = equation.right[term]
    named = {_name(equation, term, right): right, **equation.coefficients.get(term, {})}
    unique: dict[float, list[str]] = {}
    for name, value in named.items():
        if low <= value <= high:
            unique.setdefault(value, []).append(name)
    return [(" = ".join(names), value) for value, names in unique.items()]


def _name(equation: Equation, term: str, value: float) -> str:
    for name, one in equation.coefficients.get(term, {}).items():
        if one == value:
            return name
    return f"{value:.6g}"


def _bound(optimizer: UpdateRule, segment: Segment) -> torch.Tensor:
    """Return the bound of the right line."""
    return dict(optimizer.enclosures(segment.elements, segment.scalars))[segment.role].bound


def _slack(segment: Segment, equation: Equation, bound: torch.Tensor) -> torch.Tensor:
    """Return the error that each element may have: `bound`, of the right line, and of its terms.

    Derived: each of at most ROUNDINGS roundings of a term moves the result by u of the term.
    """
    format = segment.elements.format
    size = torch.zeros_like(segment.observed)
    for term, vector in equation.terms.items():
        size += (equation.right[term] * vector).abs()
    return bound + ROUNDINGS * format.u * size + 2 * format.eta + segment.wider


def _inside(
    segment: Segment, equation: Equation, values: dict[str, float], slack: torch.Tensor
) -> bool:
    exact = torch.zeros_like(segment.observed)
    size = torch.zeros_like(segment.observed)
    wide = 1.0
    for term, vector in equation.terms.items():
        exact += values[term] * vector
        size += (values[term] * vector).abs()
        if equation.right[term]:
            wide = max(wide, abs(values[term] / equation.right[term]))
    bound = wide * slack + ROUNDINGS * segment.elements.format.u * size
    return bool(((segment.observed - exact).abs() <= bound).all())


def _holds(
    optimizer: UpdateRule,
    segment: Segment,
    number: int,
    values: dict[str, float],
    bound: torch.Tensor,
) -> bool:
    for place, equation in enumerate(optimizer.equations(segment)):
        if place == number:
            slack = _slack(segment, equation, bound)
            return values.keys() == equation.terms.keys() and _inside(
                segment, equation, values, slack
            )
    return False


def copies(
    segments: Iterable[Segment], before: Iterable[torch.Tensor], right: Iterable[Enclosure]
) -> str:
    """Return words if the values are those from before the step, or the right ones rounded.

    before: values of the role before the step; right: what it should be.
    """
    same = narrow = True
    unknown = False
    for segment, old, wanted in zip(segments, before, right, strict=True):
        observed = segment.observed
        unknown = unknown or bool(observed.isnan().any())
        same = same and torch.equal(observed, old)
        narrow = narrow and _rounded(observed, wanted)
    if unknown:
        return "is NaN in part: memory that nobody wrote"
    if same:
        return "has the value from before the step: it is not updated"
    return "is the right one rounded to bf16" if narrow else ""


def _rounded(observed: torch.Tensor, right: Enclosure) -> bool:
    if not torch.equal(observed, observed.bfloat16().double()):
        return False
    low = (right.exact - right.bound).float().bfloat16().double()
    high = (right.exact + right.bound).float().bfloat16().double()
    return bool(((observed >= low) & (observed <= high)).all())
