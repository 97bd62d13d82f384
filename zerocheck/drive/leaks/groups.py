"""Process groups of a rank, and the number of collectives called in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...compat import count_exchanges
from .places import StateChange

MOST = 32
"""Process groups that jobs may leave: each has threads, connections and files."""

_world: Any = vars(distributed_c10d)["_world"]
_exchanges = count_exchanges()


class Groups:
    """Place of process groups: the earlier ones must still exist, with few new ones."""

    def __init__(self) -> None:
        self._default = dist.group.WORLD
        self._groups: list[Any] = list(_world.pg_map)
        self._most = len(self._groups) + MOST
        self._timeout = _timeout(self._default)

    def changes(self) -> Iterator[StateChange]:
        map_: Any = _world.pg_map
        lost = sum(1 for group in self._groups if group not in map_)
        if lost or dist.group.WORLD is not self._default:
            words = "the process group destroyed"
            if dist.group.WORLD is not None and dist.group.WORLD is self._default:
                words = f"{lost} process groups destroyed"
            yield StateChange(self, "groups", None, None, words, exact=False)
            return
        if len(map_) > self._most:
            words = f"{len(map_) - len(self._groups)} process groups open"
            yield StateChange(self, "groups", None, None, words, exact=False)
        elif len(map_) > len(self._groups):
            self._groups = list(map_)  # a mesh that the next cases use too
        timeout = _timeout(self._default)
        if timeout != self._timeout:
            words = f"timeout of the process group {timeout}"
            yield StateChange(self, "timeout", self._timeout, timeout, words)

    def put(self, key: str, value: Any) -> None:
        for backend in _backends(self._default):
            backend._set_default_timeout(value)
        if _timeout(self._default) != value:
            raise RuntimeError("the timeout cannot be set")

    def adopt(self, change: StateChange) -> None:
        """Do nothing: importing code may not change process groups."""


def collectives() -> dict[str, int]:
    """Count the collectives that this rank has called in each process group, by its name.

    As the group's backend counts them, without sends and receives. Under the name and " sent":
    sends less receives, of which the sum over ranks is 0. Under the empty name: the number of
    groups made.
    """
    counts = {"": int(_world.group_count)}
    for group in list(_world.pg_map):
        try:
            name = str(group.group_name)
            counts[name] = int(group._get_sequence_number_for_group())
            sent, received = _exchanges[name, "send"], _exchanges[name, "recv"]
            counts[f"{name} sent"] = sent - received
            if dist.get_backend(group) == "gloo":
                counts[name] -= sent + received
        except RuntimeError:  # a backend that does not count
            continue
    return counts


def _backends(group: Any) -> list[Any]:
    if group is None:
        return []
    found = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(backend, "options") and backend not in found:
            found.append(backend)
    return found


def _timeout(group: Any) -> Any:
    """Return the timeout of a group's backend; None where it is not exposed."""
    try:
        return next((backend.options._timeout for backend in _backends(group)), None)
    except RuntimeError:
        return None
