"""Environment variables that say on which host a rank is, and whether anything has read them.

What has read none of them in a process cannot depend on them, so that the process may be told
another place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .hosts import RankPlace

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_WATCHED = frozenset((*NAMES, *map(os.fsencode, NAMES)))
_plain: Any = type(os.environ)
_read: set[object] = set()


class _NotingReads(_plain):  # type: ignore[misc]
    """Environment that notes who asks for a place. Iterating asks for names and no values."""

    def __getitem__(self, name: Any) -> Any:
        if name in _WATCHED:
            _read.add(name)
        return super().__getitem__(name)


def values(places: Sequence[RankPlace], rank: int) -> dict[str, str]:
    """Return the variables of a rank. places: of all ranks, in their order."""
    place = places[rank]
    numbers = place.local_rank, place.local_world_size, place.host, places[-1].host + 1
    return dict(zip(NAMES, map(str, numbers), strict=True))


def watch() -> None:
    """Note from now on, in this process, whether a variable of a place is read.

    Code in C that asks for one by itself is not seen.
    """
    for environment in (os.environ, os.environb):
        environment.__class__ = _NotingReads


def were_read() -> bool:
    """Return True if the place was read, unless by `copied`."""
    return bool(_read)


def copied(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy the environment; this does not count as reading it."""
    if not isinstance(environment, _NotingReads):
        return dict(environment)
    get = super(_NotingReads, environment).__getitem__
    return {name: get(name) for name in environment}
