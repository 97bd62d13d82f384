"""Choice of the fewest hypotheses that account for every wrong element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .values import ENOUGH, Origin, bits, evidence

MOST = 24
"""Hypotheses that are combined at most: with more, the sentence would list elements one by one."""


SAMPLE = 1 << 13
"""Wrong elements that every hypothesis is compared with."""
RUN = 64
"""Consecutive elements of a sample, so that offsets are seen."""
ROUNDS = 2
"""Samples of what is left, at most, for each stage."""


class ExplainedElements(NamedTuple):
    """Wrong elements that one hypothesis accounts for."""

    origins: tuple[Origin, ...]
    """The hypothesis, and others that account for the same elements equally well."""
    mask: torch.Tensor
    """Elements over the flat vector."""


Chosen = list[tuple[tuple[Origin, ...], torch.Tensor]]
"""Hypotheses that explain the same elements, and these elements."""
Stage = Callable[[torch.Tensor], Iterable[Origin]]
"""stage(sample) -> further hypotheses, given positions of a sample of the wrong elements."""


def cover(
    observed: torch.Tensor, wrong: torch.Tensor, stages: Sequence[Stage]
) -> tuple[list[ExplainedElements], torch.Tensor]:
    """Account for the wrong elements: (accounts, mask of the unexplained elements).

    All hypotheses are compared on a sample, and those that it chooses on every element. Later
    stages are asked only if the earlier ones leave elements unexplained.
    """
    index = wrong.nonzero().reshape(-1)
    values = observed[index]
    pool: list[Origin] = []
    kept: dict[int, torch.Tensor] = {}
    left = torch.ones(len(index), dtype=torch.bool)
    chosen: Chosen = []
    for stage in stages:
        some = torch.unique(torch.cat((sampled(torch.ones_like(left)), sampled(left))))
        pool += stage(index[some])
        for _ in range(ROUNDS):
            _choose(pool, kept, index, values, some)
            of_kept = [(pool[number], match) for number, match in kept.items()]
            before = int(torch.count_nonzero(left))
            chosen, left = _greedy(of_kept, values)
            if int(torch.count_nonzero(left)) in (0, before):
                break
            some = sampled(left)
        if not bool(left.any()):
            break
    accounts = [ExplainedElements(origins, _spread(mask, index, wrong)) for origins, mask in chosen]
    return accounts, _spread(left, index, wrong)


def sampled(mask: torch.Tensor) -> torch.Tensor:
    """Return a sample of the positions in a mask: all of few, else runs spread over them."""
    where = mask.nonzero().reshape(-1)
    if len(where) <= SAMPLE:
        return where
    starts = torch.linspace(0, len(where) - RUN - 1, SAMPLE // RUN).to(torch.int64)
    return where[torch.unique(starts.view(-1, 1) + torch.arange(RUN))]


def _choose(
    pool: Sequence[Origin],
    kept: dict[int, torch.Tensor],
    index: torch.Tensor,
    values: torch.Tensor,
    some: torch.Tensor,
) -> None:
    """Compare all hypotheses on a sample, and add those that it chooses, with all their matches."""
    at, observed_bits = index[some], values[some]
    numbers, tried = [], []
    for number, origin in enumerate(pool):
        match = matches(origin, at, observed_bits)
        if match is not None:
            numbers.append(number)
            tried.append((origin, match))
    for origins, _ in _greedy(tried, observed_bits)[0]:
        for origin in origins:
            number = next(n for n, (one, _) in zip(numbers, tried, strict=True) if one is origin)
            if number not in kept:
                match = matches(origin, index, values)
                assert match is not None
                kept[number] = match


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
) -> tuple[Chosen, torch.Tensor]:
    """Take the hypothesis that explains most, of equal ones that of fewest runs, repeatedly."""
    left = torch.ones(len(values), dtype=torch.bool)
    chosen: Chosen = []
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
            few = counts[number] < origin.share * int(torch.count_nonzero(left))
            if few or counts[number] < max(most, 1) or not _counts(origin, values[here]):
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
