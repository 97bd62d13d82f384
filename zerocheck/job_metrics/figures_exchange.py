"""Exchange of figures over the store of the process group: no rank ever waits for another."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import torch.distributed as dist

from ..compat import numbered_store
from .records import RankFigures

WAITING = 10
"""Steps whose figures rank 0 waits for; those of a step that a rank left never come."""


class FiguresExchange:
    """Figures of all ranks, which rank 0 receives once every rank has sent its own.

    Every rank makes its instances in the same order. Where a process group has no store, rank 0
    receives nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._run, self._store = numbered_store(group, "zerocheck/metrics")
        self._rank, self._size = rank, size
        self._sent: dict[int, RankFigures] = {}

    def send(self, step: int, figures: RankFigures) -> None:
        """Send the figures of a step."""
        if self._rank == 0:
            self._sent[step] = figures
            if len(self._sent) > WAITING:
                del self._sent[min(self._sent)]
        elif self._store is not None:
            self._store.set(self._key(step, self._rank), msgspec.msgpack.encode(figures))

    def received(self) -> list[tuple[int, list[RankFigures]]]:
        """Return the steps whose figures are there, with those of each rank, by rank."""
        found = []
        for step in [*self._sent]:
            others = [self._key(step, rank) for rank in range(1, self._size)]
            if others and (self._store is None or not self._store.check(others)):
                continue
            figures = [self._sent.pop(step)]
            for key in others:
                sent = bytes(self._store.get(key))
                figures.append(msgspec.msgpack.decode(sent, type=RankFigures))
                with suppress(RuntimeError):  # not every store can
                    self._store.delete_key(key)
            found.append((step, figures))
        return found

    def _key(self, step: int, rank: int) -> str:
        return f"{self._run}/{step}/{rank}"
