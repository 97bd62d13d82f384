"""Release of memory used by a collective on the thread that is measured.

gloo's threads hold the tensors of a collective for a moment after it is over. If they are the last,
the allocator's events do not tell that the memory was given back. So each such storage is held here
too, and let go of when nobody else has it. A tensor whose `.data` is replaced afterwards, as FSDP1
does to cast it, takes the new storage along into the threads: that one is held too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..compat import Operators
from ..compat_memory import before_resize, users_of
from .collectives import is_collective
from .holders import address

PATIENCE_S = 2.0
"""What is waited for a thread to let go, at the end of a phase, at most. On a busy machine a thread
may stand still for a while with the last tensor in its hands."""


GRACE_S = 0.001
"""What is waited for a thread before an operator."""


class CollectiveRelease(Operators):
    """Context in which storages used by collectives are released on this thread.

    That is before the next operator or resizing, so that no memory seems to be held for longer than
    it is.
    """

    def __init__(self, gone: Callable[[int], None]) -> None:
        """Build it. gone(address): called when the memory there is freed."""
        self._gone = gone
        super().__init__()
        self._thread = threading.get_ident()
        self._held: dict[int, torch.UntypedStorage] = {}
        self._users: dict[int, int] = {}
        """How many had each of them when it was looked at last."""
        self._tensors: dict[int, TensorWeakRef] = {}
        """By id, those that a collective was called with, as long as anyone has them."""
        self._resizes = ExitStack()

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)  # torch has its threads take modes over
        self._let_go()
        result = func(*args, **kwargs)
        if is_collective(func):
            for tensor in _tensors((args, result)):
                if address(tensor):  # a wrapper has none
                    self._hold(tensor.untyped_storage())
                    self._tensors[id(tensor)] = TensorWeakRef(tensor)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        self._held[storage._cdata] = storage
        self._users[storage._cdata] = users_of(storage)

    def __enter__(self) -> CollectiveRelease:
        self._resizes.enter_context(before_resize(self._before_resize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizes.close()

    def _before_resize(self) -> None:
        """Handle FSDP's resizing of storages, which gets memory without calling an operator."""
        if threading.get_ident() == self._thread:
            self._let_go()

    def settle(self, known: Callable[[torch.UntypedStorage], bool]) -> None:
        """Wait until threads have released memory. known(storage): its holder is known."""
        ends = time.monotonic() + PATIENCE_S
        while self._let_go(known) and time.monotonic() < ends:
            time.sleep(0.0005)

    def _let_go(self, known: Callable[[torch.UntypedStorage], bool] | None = None) -> int:
        """Drop storages without other holders; return the number of unknown ones that have some."""
        self._hold_what_replaced()
        self._wait_for_threads()
        for key in [key for key, storage in self._held.items() if users_of(storage) == 1]:
            storage = self._held.pop(key, None)
            if storage is not None and storage.nbytes():
                self._gone(storage.data_ptr())
        if known is None:
            return len(self._held)
        return sum(not known(storage) for storage in self._held.values())

    def _hold_what_replaced(self) -> None:
        for key, weak in list(self._tensors.items()):
            tensor = weak()
            if tensor is None:
                del self._tensors[key]
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._hold(storage)

    def _wait_for_threads(self) -> None:
        """Give a thread time to release a storage that another holder has released.

        What the implementation keeps is not waited for, as long as it keeps it.
        """
        late = []
        for key, storage in self._held.items():
            users = users_of(storage)
            if 1 < users < self._users[key]:
                late.append(storage)
            self._users[key] = users
        ends = time.monotonic() + GRACE_S
        while late and time.monotonic() < ends:
            time.sleep(GRACE_S / 10)
            late = [storage for storage in late if users_of(storage) > 1]


def _tensors(one: Any) -> Iterator[torch.Tensor]:
    if isinstance(one, torch.Tensor):
        yield one
    elif isinstance(one, list | tuple):
        for part in one:
            yield from _tensors(part)
