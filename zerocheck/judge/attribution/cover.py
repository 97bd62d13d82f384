"""Choice of the fewest hypotheses that account for every wrong element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .values import Origin, bits, evidence

ENOUGH = 10.0
"""Bits of evidence for a hypothesis that was chosen to fit: one in a thousand fits by chance."""
MOST = 24
"""Hypotheses that are combined at most: with more, the sentence would list elements one by one."""


class Account(NamedTuple):
    """Wrong elements that one hypothesis accounts for."""

    origins: tuple[Origin, ...]
    """The hypothesis, and others that account for the same elements equally well."""
    mask: torch.Tensor
    """Elements over the flat vector."""


Stage = Callable[[torch.Tensor], Iterable[Origin]]
"""stage(left) -> further hypotheses, given the mask of the elements that none explains yet."""


def cover(
    observed: torch.Tensor, wrong: torch.Tensor, stages: Sequence[Stage]
) -> tuple[list[Account], torch.Tensor]:
    """Account for the wrong elements: (accounts, mask of the unexplained elements).

    Later stages are asked only if the earlier ones leave elements unexplained.
    """
    index = wrong.nonzero().reshape(-1)
    values = observed[index]
    pool: list[tuple[Origin, torch.Tensor]] = []
    left = wrong
    accounts: list[Account] = []
    for stage in stages:
        for origin in stage(left):
            match = matches(origin, index, values)
            if match is not None:
                pool.append((origin, match))
        chosen, rest = _greedy(pool, values)
        accounts = [Account(origins, _spread(mask, index, wrong)) for origins, mask in chosen]
        left = _spread(rest, index, wrong)
        if not bool(rest.any()):
            break
    return accounts, left


def matches(origin: Origin, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of the values that are the hypothesis's; None if none is, or all are 0.

    Values of 0 have one explanation: that they are 0.
    """
    given = origin.vector(index)
    match = bits(given) == bits(values)
    if origin.known is not None:
        match &= origin.known(index)
    if values.is_floating_point() and origin.key != "NaN":
        match &= ~values.isnan()
    if not bool(match.any()) or (origin.key != "0" and not bool((values[match] != 0).any())):
        return None
    return match


def _greedy(
    pool: Sequence[tuple[Origin, torch.Tensor]], values: torch.Tensor
) -> tuple[list[tuple[tuple[Origin, ...], torch.Tensor]], torch.Tensor]:
    """Take the hypothesis that explains most, of equal ones that of fewest runs, repeatedly."""
    left = torch.ones(len(values), dtype=torch.bool)
    chosen: list[tuple[tuple[Origin, ...], torch.Tensor]] = []
    counts = [int(torch.count_nonzero(match)) for _, match in pool]
    while bool(left.any()) and len(chosen) < MOST:
        best: list[tuple[tuple[int, int, int], int, torch.Tensor]] = []
        most = 0
        for number in sorted(range(len(pool)), key=counts.__getitem__, reverse=True):
            if counts[number] < max(most, 1):
                break
            origin, match = pool[number]
            here = match & left
            counts[number] = int(torch.count_nonzero(here))
            if counts[number] < max(most, 1) or not _counts(origin, values[here]):
                continue
            most = counts[number]
            best.append(((-most, origin.level, _runs(here)), number, here))
        if not best:
            break
        best.sort(key=lambda one: one[:2])
        (score, number, here) = best[0]
        alike: dict[object, Origin] = {}
        for other, which, mask in best:
            origin = pool[which][0]
            if other[:2] == score[:2] and torch.equal(mask, here):
                alike.setdefault(origin.key or origin.one, origin)
        chosen.append((tuple(alike.values()), here))
        left &= ~here
    return chosen, left


def _counts(origin: Origin, values: torch.Tensor) -> bool:
    chosen = origin.cost or origin.each
    return not chosen or evidence(values, origin.cost, origin.each) >= ENOUGH


def _runs(mask: torch.Tensor) -> int:
    return int(mask[:1].sum()) + int(torch.count_nonzero(mask[1:] & ~mask[:-1]))


def _spread(mask: torch.Tensor, index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    whole[index[mask]] = True
    return whole
