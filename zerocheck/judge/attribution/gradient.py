"""Attribution of a wrong gradient: the combination of known vectors that it is.

Each wrong tensor is solved for the weights of the local gradients of every rank and microbatch, and
of other vectors (the gradient of the step before, parameters, moments). Weights are accepted only
if every element lies within the bounds of that combination. First one table is tried for all wrong
tensors, then one for each holder, one for each tensor, and one for each tensor of each holder. What
no table explains is looked up: see mixtures.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ...case.schema import Case
from ...floating_point import ETA
from ...machine.hosts import places
from ..compare import compare
from ..diagnose import weights
from ..diagnose.evidence import Evidence, Vectors, enclosed_terms, weighted
from ..diagnose.gradient import setting
from ..pieces import Enclosing
from .cells import HeldCell, cells
from .sentences import has_matrix, operation
from .table import MOST_ROWS, VISIBLE, Numbers, Solution, Table, rows, solve

VAGUE = 0.05
"""Weights that are less certain could be any of several numbers."""

EXCESS = 4
"""Elements that there are more than weights, at least, where these are no plain numbers: each would
lie within its bound by chance about once in 100,000 times."""


class GradientSearch:
    """Search for the tables of the wrong tensors of one gradient."""

    def __init__(self, evidence: Evidence, wrong: torch.Tensor, others: Vectors) -> None:
        self.evidence = evidence
        self.others = others
        self.cells = cells(evidence.held, evidence.layout, wrong)
        self.numbers = numbers_of(evidence)
        self.answers: dict[int, Table] = {}
        """Table of each cell that one explains."""
        self._right = Table(torch.ones(evidence.passes.gradients.shape[:2], dtype=torch.float64))
        self._explained: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Numbers of the cells without an answer."""
        known = self.answers.keys() | self._explained
        return [number for number in range(len(self.cells)) if number not in known]

    def explain(self, numbers: Iterable[int]) -> None:
        """Take cells for explained by something else than a table."""
        self._explained.update(numbers)

    def run(self) -> None:
        """Answer as many cells as tables of plain numbers can."""
        self._take(self._right, self.open)
        self._every(plain=True)
        for number in self.open:
            self._guess(number)

    def run_on(self) -> None:
        """Answer cells by tables of any numbers.

        With as many elements as weights some table always fits, so that more are asked for.
        """
        self._every(plain=False)

    def _every(self, *, plain: bool) -> None:
        for names in self._bases():
            for groups in self._groupings():
                if not self.open:
                    return
                self._solved(groups, names, plain=plain)

    def _bases(self) -> Iterator[tuple[str, ...]]:
        """Iterate over sets of other vectors that are solved for with the local gradients."""
        yield ()
        yield from ((name,) for name in self.others)

    def _groupings(self) -> Iterator[list[list[int]]]:
        """Iterate over ways to put cells together that may have one table."""
        yield [self.open]
        if len({self.cells[n].holder.ranks for n in self.open}) > 1:
            yield self._by(lambda cell: cell.holder.ranks)
        if len({self.cells[n].place.name for n in self.open}) > 1:
            yield self._by(lambda cell: cell.place.name)
            yield [[number] for number in sorted(self.open, key=self._size, reverse=True)]

    def _by(self, key: Callable[[HeldCell], object]) -> list[list[int]]:
        found: dict[object, list[int]] = {}
        for number in self.open:
            found.setdefault(key(self.cells[number]), []).append(number)
        return list(found.values())

    def _size(self, number: int) -> int:
        return len(self.cells[number].positions)

    def _solved(
        self, groups: Sequence[Sequence[int]], names: tuple[str, ...], *, plain: bool
    ) -> None:
        """Solve for one table of each group of cells, and keep those that hold."""
        for group in groups:
            left = [number for number in group if number not in self.answers]
            if not left:
                continue
            table = self._table(left, names, plain=plain)
            if table is not None and self._fits(table, left):
                self._take(table, self.open)

    def _take(self, table: Table, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._fits(table, [number]):
                self.answers[number] = self._visible_part(table, number)

    def _visible_part(self, table: Table, number: int) -> Table:
        """Return the table with NaN for the gradients that a cell does not show."""
        cell = self.cells[number]
        terms = self.evidence.passes.gradients[..., cell.positions].to(torch.float64)
        bound = self.evidence.right.at(cell.positions).bound.clamp(min=ETA)
        visible = (terms / self.evidence.divisor / bound).abs().amax(-1) > VISIBLE
        return Table(table.weights.masked_fill(~visible, math.nan), table.others)

    def _table(self, group: Sequence[int], names: tuple[str, ...], *, plain: bool) -> Table | None:
        """Solve for the weights of some cells, and take the plain number near to each.

        plain: None where a weight is near to no such number.
        """
        solution = self.solution(group, names)
        if solution is None:
            return None
        largest = max(1.0, float(solution.values.nan_to_num(nan=0.0).abs().max()))
        uncertain = largest * float(solution.uncertain.max())
        if solution.residual > 4 * largest + uncertain or uncertain > VAGUE:
            return None
        shape = self.evidence.passes.gradients.shape[:2]
        values = solution.nearest(self.numbers, largest)
        visible = [value for value in values if value == value]
        exact = all(self.numbers.plain(value) for value in visible)
        elements = sum(self._size(number) for number in group)
        if (plain and not exact) or (not exact and elements < len(visible) + EXCESS):
            return None
        count = shape[0] * shape[1]
        weights = torch.tensor(values[:count], dtype=torch.float64).view(shape)
        more = {
            name: value
            for name, value in zip(names, values[count:], strict=True)
            if value == value and value != 0
        }
        return Table(weights, more)

    def solution(self, group: Sequence[int], names: tuple[str, ...]) -> Solution | None:
        """Solve for weights. Ranks that compute with the same samples have the same weight."""
        positions = torch.cat([self.cells[number].positions for number in group])
        values = torch.cat([self.cells[number].values for number in group])
        chosen = rows(len(positions))
        positions, values = positions[chosen], values[chosen]
        terms = self.evidence.passes.gradients[..., positions].to(torch.float64)
        terms = terms.reshape(-1, len(positions)) / self.evidence.divisor
        distinct, which = torch.unique(terms, dim=0, return_inverse=True)
        terms = torch.zeros_like(distinct).index_add_(0, which, terms)
        extra = [self.others[name][positions].to(torch.float64) for name in names]
        if extra:
            which = torch.cat([which, torch.arange(len(extra)) + len(terms)])
            terms = torch.cat([terms, torch.stack(extra)])
        finite = terms.isfinite().all(0) & values.isfinite()
        if not bool(finite.all()):
            return None
        # Where the right gradient is exact, as on one rank, a combination still rounds.
        bound = self.evidence.right.at(positions).bound
        bound = torch.maximum(bound, enclosed_terms(self.evidence, terms, positions).bound)
        solution = solve(terms, values, bound)
        if solution is None:
            return None
        return Solution(solution.values[which], solution.uncertain[which], solution.residual)

    def _guess(self, number: int) -> None:
        """Try simple tables for a cell that cannot be solved: it is too short, or terms depend."""
        cell = self.cells[number]
        if len(cell.positions) > MOST_ROWS or self.solution([number], ()) is not None:
            return
        for known in weights.every(setting(self.evidence)):
            table = Table(known.on(cell.holder.ranks[0]))
            if not table.right and self._fits(table, [number]):
                self._take(table, self.open)
                return

    def _fits(self, table: Table, numbers: Sequence[int]) -> bool:
        made = weighted(self.evidence, table.filled, table.others, self.others)
        return all(inside(self.cells[number], made) for number in numbers)


def inside(cell: HeldCell, made: Enclosing) -> bool:
    """Return True if every element of a cell lies in these enclosures."""
    return compare(cell.values, made.only(cell.positions))[1] is None


def numbers_of(evidence: Evidence) -> Numbers:
    """Return the numbers of a case that a weight may be made of, by symbol."""
    world, count = evidence.passes.gradients.shape[:2]
    return case_numbers(evidence.case, world, count, evidence.loss_scale)


def case_numbers(case: Case, world: int, count: int, loss_scale: float) -> Numbers:
    """Return the numbers of a case by symbol: ranks, microbatches, sizes of axes, loss scale."""
    mesh = case.axes
    found: dict[str, int | float] = {"W": world, "GA": count}
    symbols = {"replicate": "R", "shard": "S", "tp": "T"}
    found |= {symbols.get(axis.name, axis.name): axis.size for axis in mesh.axes}
    if case.hosts:
        found["ranks of a host"] = places(case.hosts, world)[0].local_world_size
    if loss_scale != 1:
        found["loss scale"] = loss_scale
    if found.get("S") == world:
        del found["S"]
    return Numbers(found)


def sentences(search: GradientSearch) -> dict[str, list[str]]:
    """Return the operation that tables say, and the names of the tensors with it.

    Tensors whose tables agree on every holder that has both are described together, since a shard
    shows the table of its own rank alone.
    """
    mesh = search.evidence.case.axes
    tables: dict[str, dict[tuple[int, ...], Table]] = {}
    for number, cell in enumerate(search.cells):
        answer = search.answers.get(number)
        if answer is not None:
            tables.setdefault(cell.place.name, {})[cell.holder.ranks] = answer
    found: dict[str, list[str]] = {}
    for names, joined in _joined(tables):
        words = operation(joined, search.numbers, mesh)
        if not has_matrix(words):
            found.setdefault(words, []).extend(names)
            continue
        for name in names:
            found.setdefault(operation(tables[name], search.numbers, mesh), []).append(name)
    return found


def _joined(
    tables: Mapping[str, Mapping[tuple[int, ...], Table]],
) -> list[tuple[list[str], dict[tuple[int, ...], Table]]]:
    """Return (names, tables by holder) of tensors whose tables do not contradict each other."""
    groups: list[tuple[list[str], dict[tuple[int, ...], Table]]] = []
    for name, of in tables.items():
        if all(table.right for table in of.values()):
            continue
        for names, joined in groups:
            if all(ranks not in joined or joined[ranks].fits(of[ranks]) for ranks in of):
                names.append(name)
                for ranks, table in of.items():
                    joined[ranks] = table.joined(joined[ranks]) if ranks in joined else table
                break
        else:
            groups.append(([name], dict(of)))
    return groups
