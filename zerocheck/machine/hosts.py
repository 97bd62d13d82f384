"""Hosts of the ranks: from the short form in a case to a place for each rank, and back.

The short form holds the number of ranks of each host, in the order of ranks; its last number stands
for all hosts after it, and the last host may have fewer. () is one host for all ranks. So the same
form can be read for any number of ranks, and a case with several hosts can lose ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

Hosts = tuple[int, ...]


class RankPlace(NamedTuple):
    """Location of a rank: its host (0-based), its local rank, and the host's number of ranks."""

    host: int
    local_rank: int
    local_world_size: int


def counts(hosts: Hosts, world_size: int) -> tuple[int, ...]:
    """Return the number of ranks on each host: `((2,), 3)` gives `(2, 1)`."""
    found: list[int] = []
    left = world_size
    for given in chain(hosts or (world_size,), repeat(hosts[-1] if hosts else 1)):
        found.append(min(given, left))
        left -= found[-1]
        if left == 0:
            return tuple(found)
    raise AssertionError("repeat() has no end")


def places(hosts: Hosts, world_size: int) -> tuple[RankPlace, ...]:
    """Return the place of each rank."""
    return tuple(
        RankPlace(host, local_rank, count)
        for host, count in enumerate(counts(hosts, world_size))
        for local_rank in range(count)
    )


def spelled(on_each: Sequence[int]) -> Hosts:
    """Return the shortest form of these numbers of ranks: `(2, 2, 1)` is `(2,)`, `(3,)` is `()`."""
    world_size = sum(on_each)
    if len(on_each) < 2:
        return ()
    forms = (tuple(on_each[:length]) for length in range(1, len(on_each) + 1))
    return next(form for form in forms if counts(form, world_size) == tuple(on_each))


def drawn(seed: int, world_size: int) -> Hosts:
    """Draw the hosts of a case: one for three of four seeds, else two or more.

    By the seed of the case, and not by a choice of its own, so that all other choices stay what
    they are. In turns: two hosts as equal as can be, a host for each rank, one rank on the first.
    """
    kind = seed % 12
    if kind < 9 or world_size == 1:
        return ()
    half = -(-world_size // 2)
    first = {9: (half, world_size - half), 10: (1,) * world_size, 11: (1, world_size - 1)}[kind]
    return spelled(first)
