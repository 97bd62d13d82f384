"""Attribution of the gradient of a parameter that a forward uses several times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch

from ..compare import compare
from ..diagnose.evidence import enclosed_terms
from ..uses import UsedParts
from .cells import HeldCell
from .gradient import GradientSearch
from .sentences import operation
from .table import Table, rows, solve

Parts = Mapping[str, UsedParts]
"""Parts of the gradients of parameters with several uses, by the name of the parameter."""


def by_use(search: GradientSearch, parts: Parts) -> tuple[dict[str, list[str]], list[int]]:
    """Return ({operation: names of tensors}, numbers of the cells that it explains)."""
    found: dict[str, list[str]] = {}
    explained: list[int] = []
    for name in dict.fromkeys(search.cells[number].place.name for number in search.open):
        numbers = [number for number in search.open if search.cells[number].place.name == name]
        if name not in parts:
            continue
        tables: dict[tuple[int, ...], list[Table]] = {}
        for number in numbers:
            cell = search.cells[number]
            made = _tables(search, cell, parts[name])
            if made is not None:
                tables[cell.holder.ranks] = made
        if len(tables) == len(numbers):
            explained += numbers
            found.setdefault(_words(search, tables, parts[name]), []).append(name)
    return found, explained


def _words(
    search: GradientSearch, tables: Mapping[tuple[int, ...], Sequence[Table]], parts: UsedParts
) -> str:
    words = []
    for number, module in enumerate(parts.modules):
        of_use = {ranks: made[number] for ranks, made in tables.items()}
        if any(not table.right for table in of_use.values()):
            wrong = operation(of_use, search.numbers, search.evidence.case.axes)
            where = module or "the model"
            words.append(f"of its use {number + 1} of {len(parts.modules)} (in {where}), {wrong}")
    return "; ".join(words)


def _tables(search: GradientSearch, cell: HeldCell, parts: UsedParts) -> list[Table] | None:
    """Return the table of each use for a cell, or None."""
    uses, world, count, _ = parts.gradients.shape
    here = cell.positions - cell.place.start
    divisor = search.evidence.divisor
    terms = parts.gradients[..., here].double().reshape(uses * world * count, -1) / divisor
    bound = search.evidence.right.at(cell.positions).bound
    chosen = rows(len(here))
    solution = solve(terms[:, chosen], cell.values[chosen], bound[chosen])
    if solution is not None:
        values = solution.nearest(search.numbers)
        weights = torch.tensor(values, dtype=torch.float64).view(uses, world, count)
        plain = all(search.numbers.plain(one) for one in values if one == one)
        if plain and _fits(search, cell, terms, weights):
            return [Table(one) for one in weights]
    for weights in _simple(uses, world, count, cell.holder.ranks[0]):
        if _fits(search, cell, terms, weights):
            return [Table(one) for one in weights]
    return None


def _simple(uses: int, world: int, count: int, rank: int) -> Iterator[torch.Tensor]:
    """Iterate over tables of one use: left out, doubled, or of the rank alone."""
    ones = torch.ones(uses, world, count, dtype=torch.float64)
    for use, factor in product(range(uses), (0.0, 2.0)):
        changed = ones.clone()
        changed[use] = factor
        yield changed
    for use, factor in product(range(uses), (1.0, float(world))):
        for others in (0.0, 1.0):
            changed = ones * others
            changed[use] = 0.0
            changed[use, rank] = factor
            yield changed


def _fits(
    search: GradientSearch, cell: HeldCell, terms: torch.Tensor, weights: torch.Tensor
) -> bool:
    flat = terms * weights.nan_to_num(nan=1.0).reshape(-1, 1)
    made = enclosed_terms(search.evidence, flat, cell.positions)
    return compare(cell.values, made)[1] is None
