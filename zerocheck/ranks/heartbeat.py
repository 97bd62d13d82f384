"""Heartbeat thread, which reports the position of a rank to rank 0 through the store."""

from __future__ import annotations

import sys
import threading
import time
import traceback

import msgspec

from zerocheck.ranks.messages import Message, frame
from zerocheck.ranks.progress import Board, RankPosition
from zerocheck.ranks.store_mail import StoreMail

INTERVAL_S = 1.0
_CPU_SHARE = 0.1


class Beat(Message, frozen=True):
    """`number`: 1 for the first of a job. `cpu_s`: processor time of the process so far.

    `stack`: of its main thread.
    """

    number: int
    counter: int
    cpu_s: float
    where: str
    collective: str
    collective_sequence: int
    recent: dict[int, int]
    stack: str


_HEADER_BYTES = 8
_decode = msgspec.msgpack.Decoder(Beat).decode


class Heartbeat:
    """Beats while a job runs. Its store must be its own: a store serves one thread at a time."""

    def __init__(self, mail: StoreMail, board: Board) -> None:
        self._mail = mail
        self._board = board
        self._key = ""
        self._number = 0
        self._wake = threading.Event()
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._run, name="zerocheck-heartbeat", daemon=True).start()

    def start(self, key: str) -> None:
        self._key = key
        self._number = 0
        self._wake.set()

    def stop(self) -> None:
        self._wake.clear()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(INTERVAL_S)  # most jobs are over before the first beat
            if not self._wake.is_set():
                continue
            try:
                self._mail.post(self._key, frame(self._beat())[_HEADER_BYTES:])
            except Exception:  # the store is gone, and the job with it
                return

    def _beat(self) -> Beat:
        standing: RankPosition = self._board.read(0)
        top = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(top)) if top is not None else ""
        self._number += 1
        return Beat(
            number=self._number,
            counter=standing.counter,
            cpu_s=time.process_time(),
            where=standing.where,
            collective=standing.collective,
            collective_sequence=standing.collective_sequence,
            recent=standing.recent,
            stack=stack,
        )


def read_beat(mail: StoreMail, key: str) -> Beat | None:
    """The last beat, if there was one."""
    data = mail.peek(key)
    return None if data is None else _decode(data)


def moved(before: dict[int, Beat | None], now: dict[int, Beat | None], seconds: float) -> bool:
    """Return True if a rank that has not reported made progress, or computes."""
    for rank, beat in now.items():
        if beat is None:
            continue
        last = before.get(rank)
        if last is None or beat.counter != last.counter:
            return True
        if beat.cpu_s - last.cpu_s > 0.1 + _CPU_SHARE * seconds:
            return True
    return False
