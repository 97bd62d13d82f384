"""Agreement of all ranks, at the end of a step, on whether each of them reached it.

A script can raise in a step on one rank, catch it, and go on. The others must not wait for that
rank in a collective, since its next one is of the training. So they agree by the store of the
process group. A store has no order: the rank that leaves a step writes so, and the others read it.

Each step has one entry that is written once: "judge" by the last rank that arrives, "leave" by the
first that does not. So all ranks read the same.

A rank that dies writes nothing. So each rank writes beats during a step, and the others leave the
step if one falls silent: the next collective of the training then says what happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist

from ..compat import numbered_store
from .record.ranks import AllRanks

_BEAT_S = 1.0
_SILENT_S = 15.0
"""A rank that is only slow, with a thread that cannot run, costs the check of a step."""
_LOOK_S = 0.02


class Arrivals:
    """The ends of the steps of one attached run."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take the next number of the group: every rank makes its instances in the same order."""
        self._run, self._store = numbered_store(group, "zerocheck")
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None
        self.silent: list[int] = []
        """Ranks that this one has not heard of, so that the step was left."""

    def begin(self, number: int, rank: int) -> None:
        """Begin a step: write beats until it ends."""
        self._end()
        self._ended = threading.Event()
        if self._store is not None:
            key = f"{self._run}/{number}/beat/{rank}"
            args = key, self._ended
            self._beats = threading.Thread(target=self._beat, args=args, daemon=True)
            self._beats.start()

    def _end(self) -> None:
        """End the beats: a thread within the store when Python ends would abort the process."""
        self._ended.set()
        if self._beats is not None:
            self._beats.join(_BEAT_S)

    def _beat(self, key: str, ended: threading.Event) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone
            while not ended.is_set():
                self._store.set(key, str(count))
                count += 1
                ended.wait(_BEAT_S)

    def arrive(self, number: int, ranks: AllRanks) -> bool:
        """Wait for all ranks; return True if the step is judged, equal on all of them."""
        if self._store is None:
            return True
        try:
            return self._arrive(number, ranks)
        finally:
            self._end()

    def _arrive(self, number: int, ranks: AllRanks) -> bool:
        key = f"{self._run}/{number}"
        if self._store.add(f"{key}/arrived", 1) == ranks.size:
            return self._decide(key, "judge")
        until = time.monotonic() + self._store.timeout.total_seconds()
        beats: dict[int, tuple[bytes, float]] = {}
        looked = 0.0
        while not self._store.check([key]):
            now = time.monotonic()
            if now - looked > _BEAT_S:
                looked = now
                # All listen to rank 0, which listens to all: the store has a beat of each to read.
                others = range(1, ranks.size) if ranks.rank == 0 else (0,)
                self._listen(f"{key}/beat", others, beats)
                silent = [r for r, (_, since) in beats.items() if now - since > _SILENT_S]
                # Or so long that a collective would have failed too.
                if silent or now > until:
                    self.silent = silent
                    return self._decide(key, "leave")
            time.sleep(_LOOK_S)
        return self._decide(key, "judge")

    def _listen(
        self, key: str, ranks: Iterable[int], beats: dict[int, tuple[bytes, float]]
    ) -> None:
        """Note the last beat of ranks that have begun the step, and when it was new."""
        for rank in ranks:
            name = f"{key}/{rank}"
            if self._store.check([name]):
                beat = self._store.get(name)
                if rank not in beats or beats[rank][0] != beat:
                    beats[rank] = beat, time.monotonic()

    def leave(self, number: int) -> None:
        """Tell the others that this rank left the step."""
        self._end()
        if self._store is not None:
            self._decide(f"{self._run}/{number}", "leave")

    def _decide(self, key: str, decision: str) -> bool:
        assert self._store is not None
        return bool(self._store.compare_set(key, "", decision) == b"judge")
