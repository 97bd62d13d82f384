"""Watchdog: distinguishes a team that hangs from a slow one, by progress and not by wall time.

On a loaded machine a rank may wait seconds for a core; then it is runnable, and runnable is not
hung. Hung means: for `patience_s` no unfinished rank moved its progress counter, none used the
processor, and every thread of them, and of their children (compilers, for instance), slept.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from zerocheck.ranks.progress import Board

Verdict = Literal["quiet", "ceiling"]
_NO_PROC_PATIENCE_S = 60.0
_LONGEST_GAP_S = 1.0
_IDLE_S = 2.0
_CPU_SHARE = 0.05
_STOPPED = b"T"
"""By a signal. One that a debugger holds is in another state, and waits for a person."""
_ASLEEP = (b"S", b"Z", b"X", b"I", _STOPPED)
_POLLER = b"(gloo_tcp_loop"
"""gloo's thread wakes 100 times a second to find nothing: that alone is no work."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Activity(NamedTuple):
    """Activity of a process and its descendants.

    ticks: processor time; asleep: all threads sleep; stopped: a signal stopped the process.
    """

    ticks: int
    asleep: bool
    stopped: bool = False


def activity(pid: int, *, alone: bool = False) -> Activity | None:
    """None where there is no /proc, or no such process any more. alone: without descendants."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        ticks = sum(map(int, fields[11:15]))
        stopped = fields[0] == _STOPPED
        asleep = True
        children: list[bytes] = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            base = f"/proc/{pid}/task/{thread}"
            try:
                with open(f"{base}/stat", "rb") as stat:
                    name, _, rest = stat.read().rpartition(b")")
                with open(f"{base}/children", "rb") as listing:
                    children += listing.read().split()
            except FileNotFoundError:  # the thread ended, or the kernel lists no children
                continue
            state = rest.split(None, 1)[0]
            asleep &= state in _ASLEEP or (state == b"R" and name.endswith(_POLLER))
    except (OSError, ValueError, IndexError):
        return None
    for child in () if alone else children:
        below = activity(int(child))
        if below is not None:
            ticks += below.ticks
            asleep &= below.asleep
    return Activity(ticks, asleep, stopped)


class Watchdog:
    """Watches one job of one team. Time counts only while somebody looks, about once a second.

    So neither a parent that was busy elsewhere, nor a suspended machine, makes a rank look hung.
    """

    def __init__(
        self,
        board: Board,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[int], Activity | None] = activity,
    ) -> None:
        self._board = board
        self._clock = clock
        self._look = look
        self._proc = sys.platform == "linux" and os.path.exists("/proc/self/stat")
        self._last: float | None = None
        self._counters: tuple[int, ...] = ()
        self._ticks: dict[int, int] = {}
        self._still_s = 0.0  # since a counter moved
        self._quiet_s = 0.0  # since anything at all moved
        self.awake: frozenset[int] = frozenset()
        self.stopped: frozenset[int] = frozenset()
        """Ranks that a signal stopped."""

    @property
    def idle(self) -> bool:
        """True if the ranks hang or wait, so that other runs may have the processor meanwhile."""
        return self._quiet_s > _IDLE_S

    def look(
        self, ranks: Sequence[int], pids: Sequence[int], *, patience_s: float, ceiling_s: float
    ) -> Verdict | None:
        """`ranks` are the unfinished ones; `pids` those of all ranks of the team.

        "quiet": nothing moved for `patience_s`. "ceiling": processors are busy, but no counter
        moved for `ceiling_s`.
        """
        now = self._clock()
        gap = 0.0 if self._last is None else min(now - self._last, _LONGEST_GAP_S)
        self._last = now
        counters = tuple(self._board.counter(rank) for rank in ranks)
        if counters != self._counters:
            self._counters = counters
            self._still_s = 0.0
            self._start_quiet({})
            return None
        self._still_s += gap
        if self._still_s >= ceiling_s:
            self._measure(ranks, pids)
            return "ceiling"
        if not self._proc:
            return "quiet" if self._still_s >= max(patience_s, _NO_PROC_PATIENCE_S) else None
        ticks = self._measure(ranks, pids)
        if self.awake or set(ticks) != set(self._ticks) or self._used(ticks):
            self._start_quiet(ticks)
            return None
        self._quiet_s += gap
        return "quiet" if self._quiet_s >= patience_s else None

    def _measure(self, ranks: Iterable[int], pids: Sequence[int]) -> dict[int, int]:
        ticks = {}
        awake, stopped = set(), set()
        for rank in ranks:
            state = self._look(pids[rank]) if self._proc else None
            if state is not None:
                ticks[rank] = state.ticks
                if not state.asleep:
                    awake.add(rank)
                if state.stopped:
                    stopped.add(rank)
        self.awake, self.stopped = frozenset(awake), frozenset(stopped)
        return ticks

    def _used(self, ticks: dict[int, int]) -> bool:
        """Return True if more processor time was used than idle polling explains."""
        allowed = 1 + _CPU_SHARE * self._quiet_s * _TICKS_PER_S
        return any(now - self._ticks[rank] > allowed for rank, now in ticks.items())

    def _start_quiet(self, ticks: dict[int, int]) -> None:
        self._quiet_s = 0.0
        self._ticks = ticks
