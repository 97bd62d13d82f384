"""Bytes of any length through a c10d store, for ranks that share nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

CHUNK_BYTES = 4 << 20
"""The store's server refuses values above 8 MiB."""
_LONGEST_PAUSE_S = 0.02


class StoreMail:
    """Each key is written once and read once. Waiting is done by polling.

    The store's own wait logs a warning at every timeout, and cannot be interrupted.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, data: bytes | memoryview) -> None:
        """The reader sees the key once all of it is there."""
        pieces = range(0, len(data), CHUNK_BYTES)
        for number, start in enumerate(pieces):
            self._set(f"{key}/{number}", bytes(data[start : start + CHUNK_BYTES]))
        self._set(key, str(len(pieces)).encode())

    def ready(self, key: str) -> bool:
        return self._store.check([key])

    def take(self, key: str) -> bytes:
        """The value, which is removed. Blocks until it is there."""
        pieces = []
        for number in range(int(self._store.get(key))):
            pieces.append(self._store.get(f"{key}/{number}"))
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
        return b"".join(pieces)

    def wait(self, key: str, *, give_up: Callable[[], bool] | None = None) -> bool:
        """Wait until the key is there; False if `give_up` became true first."""
        pause = 0.0005
        while not self.ready(key):
            if give_up is not None and give_up():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def post(self, key: str, data: bytes) -> None:
        """Write a short value that is overwritten and read any number of times."""
        self._set(key, data)

    def peek(self, key: str) -> bytes | None:
        return self._store.get(key) if self.ready(key) else None

    def _set(self, key: str, data: bytes) -> None:
        # The stub says str; the binding takes bytes as they are.
        self._store.set(key, data)  # type: ignore[arg-type]
