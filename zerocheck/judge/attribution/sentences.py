"""Sentence of the tables that ranks have for a tensor: the operation that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized

import torch

from ...case.mesh import Mesh
from .table import Numbers, Table
from .tensors import numbered

Tables = Mapping[tuple[int, ...], Table]
"""Table of each holder, by its ranks."""

MOST_FACTORS = 4
"""Factors that a clause lists, by the ranks that have them."""

NOTHING = "it is 0: no local gradient is in it"


def operation(tables: Tables, numbers: Numbers, mesh: Mesh) -> str:
    """Return what the tables say, in one clause, with the weights where no clause says all."""
    tables = dict(sorted(tables.items(), key=lambda one: int(one[1].weights.isnan().sum())))
    wrong = {ranks: table for ranks, table in tables.items() if not table.right}
    others = dict.fromkeys(name for table in wrong.values() for name in table.others)
    if others:
        return _with_others(wrong, tuple(others), numbers)
    for text, wanted in _patterns(tables, numbers, mesh):
        if all(table.agrees(wanted(ranks)) for ranks, table in tables.items()):
            return text + _partly(wrong, tables)
    for text, wanted in _patterns(wrong, numbers, mesh):
        if all(table.agrees(wanted(ranks)) for ranks, table in wrong.items()):
            return f"on {_ranks(wrong)}, {text}"
    ranks, table = next(iter(wrong.items()))
    if all(bool(((one.filled == 0) | (one.filled == 1)).all()) for one in wrong.values()):
        return f"some local gradients count 0 times{matrix(table, ranks, tables)}"
    return f"the weights of local gradients are wrong{matrix(table, ranks, tables)}"


def has_matrix(words: str) -> bool:
    """Return True if no clause says all, and the weights are printed."""
    return "(weights, " in words


def matrix(table: Table, ranks: Sequence[int], tables: Tables) -> str:
    """Return the weights as text, rank by rank, for the first holder."""
    rows = " / ".join(
        " ".join("?" if value != value else f"{value:.4g}" for value in row)
        for row in table.weights.tolist()
    )
    alike = all(table.fits(one) for one in tables.values())
    whose = "" if alike else f", on {numbered(ranks, 'rank')}"
    return f" (weights, rank by rank / microbatch by microbatch, 1 is right{whose}: {rows})"


def _ranks(tables: Tables) -> str:
    return numbered({rank for ranks in tables for rank in ranks}, "rank")


def _partly(wrong: Tables, tables: Tables) -> str:
    return f" (seen on {_ranks(wrong)})" if len(wrong) < len(tables) else ""


def _with_others(wrong: Tables, others: Sequence[str], numbers: Numbers) -> str:
    table = next(iter(wrong.values()))
    gradients = table.filled
    extra = " and ".join(
        f"{name}, {numbers.spelled(table.others[name])}" for name in others if name in table.others
    )
    if bool((gradients == 0).all()):
        return f"it is {extra}, and no gradient of this step is in it"
    if bool((gradients == 1).all()):
        return f"it is the right gradient plus {extra}"
    return f"{extra} is in it{matrix(table, next(iter(wrong)), wrong)}"


Weights = Callable[[tuple[int, ...]], torch.Tensor]
"""Weights as a function of the ranks that hold a gradient."""


def _alike(weights: torch.Tensor) -> Weights:
    """Return weights that are the same on every rank."""
    return lambda ranks: weights


def _patterns(tables: Tables, numbers: Numbers, mesh: Mesh) -> Iterator[tuple[str, Weights]]:
    """Iterate over (words, weights that they mean), plain ones first."""
    first = next(table for table in tables.values() if not table.right)
    world, count = first.weights.shape
    ones = torch.ones(world, count, dtype=torch.float64)
    yield from _uniform(tables, numbers, ones)
    yield from _by_axis(tables, numbers, ones, mesh)
    if count > 1:
        yield from _microbatches(first, numbers, ones)
    if world > 1:
        yield from _sources(first, numbers, ones)
        yield from _single(first, numbers, ones)
        yield from _reduced_in_part(tables, numbers, ones)


def _visible(table: Table) -> torch.Tensor:
    return table.weights[~table.weights.isnan()]


def _uniform(tables: Tables, numbers: Numbers, ones: torch.Tensor) -> Iterator[tuple[str, Weights]]:
    for table in tables.values():
        visible = _visible(table)
        if len(visible) and not table.right:
            factor = float(visible[0])
            if factor == 0:
                yield NOTHING, _alike(ones * 0)
            yield f"every local gradient counts {numbers.spelled(factor)}", _alike(ones * factor)
            break
    # Another factor on each rank, as where ranks of a host divide by their own number.
    factors = {ranks: _visible(table) for ranks, table in tables.items()}
    if all(len(some) and bool((some == some[0]).all()) for some in factors.values()):
        found: dict[float, list[int]] = {}
        for ranks, some in factors.items():
            found.setdefault(float(some[0]), []).extend(ranks)
        on_each = " and ".join(
            f"{numbers.spelled(factor)} on {numbered(ranks, 'rank')}"
            for factor, ranks in sorted(found.items(), key=lambda one: min(one[1]))
        )
        counts = {rank: factor for factor, ranks in found.items() for rank in ranks}
        if 1 < len(found) <= MOST_FACTORS:
            yield f"every local gradient counts {on_each}", lambda ranks: ones * counts[ranks[0]]


def _groups(tables: Tables, mesh: Mesh) -> Iterator[tuple[str, dict[int, tuple[int, ...]]]]:
    """Iterate over (words, group of each rank) of ranks that may be reduced apart."""
    world = mesh.world_size
    yield "each rank holds its own gradient alone", {rank: (rank,) for rank in range(world)}
    for axis in mesh.axes:
        members = {rank: tuple(mesh.group(rank, axis.name)) for rank in range(world)}
        if 1 < len(members[0]) < world:
            yield (
                f"it is reduced over the {axis.name} axis alone ({_shown(members.values())} apart)",
                members,
            )
    support: dict[int, tuple[int, ...]] = {}
    for ranks, table in tables.items():
        inside = (table.weights.nan_to_num(nan=0.0) != 0).any(1).nonzero().reshape(-1).tolist()
        support.update(dict.fromkeys(ranks, tuple(inside)))
    if len(support) == world and _partition(support):
        yield f"{_shown(support.values())} are reduced apart", support


def _partition(groups: Mapping[int, tuple[int, ...]]) -> bool:
    """Return True if these are several groups, each with its own ranks in it."""
    return len(set(groups.values())) > 1 and all(
        rank in group and all(groups.get(member) == group for member in group)
        for rank, group in groups.items()
    )


def _shown(groups: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(numbered(group, "rank") for group in dict.fromkeys(groups))


def _by_axis(
    tables: Tables, numbers: Numbers, ones: torch.Tensor, mesh: Mesh
) -> Iterator[tuple[str, Weights]]:
    """Gradients of a group of ranks alone: one rank, an axis, neighbours."""
    world, count = ones.shape
    if world == 1 or mesh.world_size != world:
        return
    visible = [ranks[0] for ranks, table in tables.items() if len(_visible(table))]
    for words, members in _groups(tables, mesh):
        factors = _factors(tables, members)
        if factors is None:
            continue

        def inside(
            ranks: tuple[int, ...],
            members: Mapping[int, tuple[int, ...]] = members,
            factors: Mapping[int, float] = factors,
        ) -> torch.Tensor:
            alone = ones * 0
            alone[list(members[ranks[0]])] = factors.get(ranks[0], 1.0)
            return alone

        counted = _counted(factors, members, world, numbers)
        if len(visible) == 1 and len(members[visible[0]]) == 1:
            (rank,) = visible
            missing = numbered([one for one in range(world) if one != rank], "rank")
            yield (
                f"rank {rank} holds its own gradient alone, {counted}: it is not reduced over "
                f"all ranks, that of {missing} counts 0 times",
                inside,
            )
        yield f"{words}, {counted}: it is not reduced over all ranks", inside
        if count > 1:
            last = torch.zeros(count, dtype=torch.float64)
            last[-1] = 1.0
            yield f"{words}, of the last microbatch alone, {counted}", _masked(inside, last)


def _masked(weights: Weights, mask: torch.Tensor) -> Weights:
    return lambda ranks: weights(ranks) * mask


def _factors(tables: Tables, members: Mapping[int, tuple[int, ...]]) -> Mapping[int, float] | None:
    """Return the weight of a group's gradients at each holder, None where it has several."""
    found: dict[int, float] = {}
    for ranks, table in tables.items():
        values = {
            round(value, 9): value
            for value in table.weights[list(members[ranks[0]])].reshape(-1).tolist()
            if value == value and value != 0
        }
        if len(values) > 1:
            return None
        found |= dict.fromkeys(ranks, *values.values()) if values else {}
    return found


def _counted(
    factors: Mapping[int, float],
    members: Mapping[int, tuple[int, ...]],
    world: int,
    numbers: Numbers,
) -> str:
    values = set(factors.values())
    if len(values) > 1:
        mean = all(abs(v - world / len(members[rank])) < 1e-6 for rank, v in factors.items())
        return "each averaged over its ranks" if mean else "counted differently"
    return f"counted {numbers.spelled(values.pop() if values else 1.0)}"


def _microbatches(
    first: Table, numbers: Numbers, ones: torch.Tensor
) -> Iterator[tuple[str, Weights]]:
    """Weights that depend on the microbatch alone."""
    _, count = ones.shape
    row = _common(first.weights, 0)
    if row is None:
        return
    wanted = _alike(ones * row)
    values = row.tolist()
    wrong = [number for number, value in enumerate(values) if value != 1]
    alone = [number for number, value in enumerate(values) if value != 0]
    if len(alone) == 1:
        which = "the last" if alone[0] == count - 1 else "the first" if alone[0] == 0 else "one"
        yield (
            f"only microbatch {alone[0]} ({which} of {count}) is in it, "
            f"{numbers.spelled(values[alone[0]])}",
            wanted,
        )
        return
    if len(wrong) == 1 or len({values[number] for number in wrong}) == 1:
        spelled = numbers.spelled(values[wrong[0]]) if wrong else ""
        verb = "counts" if len(wrong) == 1 else "count"
        yield f"{numbered(wrong, 'microbatch')} of {count} {verb} {spelled}", wanted
        return
    shown = ", ".join(numbers.spelled(value) for value in values)
    yield f"microbatches 0 to {count - 1} count {shown}", wanted


def _common(weights: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the weights that all rows (dim 0) or columns (dim 1) share, or None."""
    hidden = weights.isnan()
    low = weights.nan_to_num(nan=torch.inf).amin(dim)
    high = weights.nan_to_num(nan=-torch.inf).amax(dim)
    if not torch.allclose(low, high, rtol=1e-6, atol=1e-9):
        return None
    return torch.where(hidden.all(dim), torch.ones_like(low), low)


def _sources(first: Table, numbers: Numbers, ones: torch.Tensor) -> Iterator[tuple[str, Weights]]:
    """Weights that depend on the rank that computed a gradient alone."""
    column = _common(first.weights, 1)
    if column is None:
        return
    values = column.tolist()
    kinds = dict.fromkeys(value for value in values if value != 1)
    parts = [
        f"{numbered([r for r, v in enumerate(values) if v == kind], 'rank')} counts "
        f"{numbers.spelled(kind)}"
        for kind in list(kinds)[:4]
    ]
    if len(kinds) <= 4:
        weights = _alike(ones * column.unsqueeze(1))
        yield f"the local gradient of {' and that of '.join(parts)}", weights


def _single(first: Table, numbers: Numbers, ones: torch.Tensor) -> Iterator[tuple[str, Weights]]:
    """One gradient of one rank and microbatch."""
    wrong = (first.filled != 1).nonzero().tolist()
    if len(wrong) == 1:
        rank, number = wrong[0]
        value = float(first.filled[rank, number])
        yield (
            f"the local gradient of rank {rank} of microbatch {number} counts "
            f"{numbers.spelled(value)}",
            _alike(first.filled),
        )


def _reduced_in_part(
    tables: Tables, numbers: Numbers, ones: torch.Tensor
) -> Iterator[tuple[str, Weights]]:
    """Some microbatches are reduced, and others are each rank's own."""
    count = ones.shape[1]
    if count == 1:
        return
    first_ranks, first = next(one for one in tables.items() if not one[1].right)
    own = first_ranks[0]
    reduced = [n for n in range(count) if bool((first.filled[:, n] != 0).sum() > 1)]
    apart = [n for n in range(count) if n not in reduced]
    values = [float(first.filled[own, n]) for n in apart]
    if not reduced or not apart or len(set(values)) > 1:
        return

    def mixed(ranks: tuple[int, ...]) -> torch.Tensor:
        made = ones.clone()
        made[:, apart] = 0
        for number, value in zip(apart, values, strict=True):
            made[ranks[0], number] = value
        return made

    yield (
        f"only {numbered(reduced, 'microbatch')} of {count} {_is(reduced)} reduced over ranks; "
        f"{numbered(apart, 'microbatch')} {_is(apart)} each rank's own, counted "
        f"{numbers.spelled(values[0])}",
        mixed,
    )


def _is(several: Sized) -> str:
    return "is" if len(several) == 1 else "are"
