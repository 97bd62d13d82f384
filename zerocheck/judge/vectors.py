"""Whole vectors of a large model: in memory while a quarter of it is left, else in files.

The pages of a file make way when memory is short. So what the judge needs of memory is what the
reference itself holds, and pieces; a vector as long as the model needs room in the folder of
TMPDIR. Vectors that are small, of all models that cases draw, are plain tensors.
"""

from __future__ import annotations

import math
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ..errors import HarnessError
from ..machine.host import FULL, leaves, reserve

LARGE_BYTES = 1 << 26
"""Bytes from which on a vector may lie in a file."""
HUGE_BYTES = 1 << 22
"""Bytes from which on a vector lies in huge pages, if it is in memory."""
SPARE = 4
"""A quarter of the memory is left to others: the ranks, which have done, wait while one judges."""
AT_ONCE = 1 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate an uninitialised tensor. Raises HarnessError where there is no room for it."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size >= LARGE_BYTES and not (_in_memory.has(size) or _fits(size)):
        return _in_files.take(size).view(dtype).view(shape)
    if size >= HUGE_BYTES:
        return _in_memory.take(size).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


def _fits(size: int) -> bool:
    if not leaves(SPARE, size):
        _in_memory.give_back()
    return leaves(SPARE, size)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate a tensor like `empty`, filled with 0."""
    return empty(*shape, dtype=dtype).zero_()


def copy(vector: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor, to another dtype if one is given."""
    return empty(*vector.shape, dtype=dtype or vector.dtype).copy_(vector)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate 1-D vectors of one dtype."""
    if not parts:
        return torch.empty(0)
    into = empty(sum(len(part) for part in parts), dtype=parts[0].dtype)
    return torch.cat(list(parts), out=into) if len(into) else into


def taken(vector: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return vector[index], both 1-D."""
    into = empty(len(index), dtype=vector.dtype)
    return torch.index_select(vector, 0, index, out=into)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions where a mask is set, ascending, int64."""
    into = empty(int(torch.count_nonzero(mask)), dtype=torch.int64)
    at = 0
    for start in range(0, len(mask), AT_ONCE):
        found = mask[start : start + AT_ONCE].nonzero().reshape(-1)
        torch.add(found, start, out=into[at : at + len(found)])
        at += len(found)
    return into


def ranges(starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return the integers of these ranges, one after the other, int64."""
    into = empty(sum(counts), dtype=torch.int64)
    at = 0
    for start, count in zip(starts, counts, strict=True):
        torch.arange(start, start + count, out=into[at : at + count])
        at += count
    return into


_PAGE = 1 << 21


class _Reused:
    """Memory of vectors that are gone, kept within `reused` for the next ones of the same size.

    To clear a page again takes as long as to write it, and 20 times as long in a virtual machine
    that has given it back; a file's page takes longer still. Never more is kept than was in use at
    once.
    """

    def __init__(self, make: Callable[[int], mmap.mmap]) -> None:
        """make: maps so many bytes, and a page of 2 MiB more."""
        self._make = make
        self._free: dict[int, list[mmap.mmap]] = {}
        self._used = 0
        self._kept = 0
        self._most = 0
        self._open = 0

    def open(self) -> None:
        """Keep from now on, and count anew what is in use at once."""
        if not self._open:
            self._most = self._used
        self._open += 1

    def close(self) -> None:
        """Keep nothing, if nobody else opened it."""
        self._open -= 1
        if not self._open:
            self.give_back()

    def has(self, size: int) -> bool:
        """Return True if a vector of so many bytes left its memory."""
        return bool(self._free.get(size))

    def take(self, size: int) -> torch.Tensor:
        """Return so many bytes, which begin a huge page. Raises OSError."""
        if self.has(size):
            memory = self._free[size].pop()
            self._kept -= size
        else:
            if self._used + size + self._kept > self._most:
                self.give_back()
            memory = self._make(size + _PAGE)
        self._used += size
        self._most = max(self._most, self._used)
        view = memoryview(memory)  # which the tensor keeps
        weakref.finalize(view, self._left, memory, size).atexit = False
        whole = torch.frombuffer(view, dtype=torch.uint8)
        return whole[-whole.data_ptr() % _PAGE :][:size]

    def give_back(self) -> None:
        """Keep nothing of what was left until now."""
        self._free.clear()
        self._kept = 0

    def _left(self, memory: mmap.mmap, size: int) -> None:
        self._used -= size
        if self._open:
            self._kept += size
            self._free.setdefault(size, []).append(memory)


def _huge_pages(size: int) -> mmap.mmap:
    """Map memory in huge pages, where the system has them.

    A page fault every 4 KiB takes four times as long as the copy that causes it. torch asks for
    huge pages only where the environment of the process tells it to.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _file(size: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(prefix="zerocheck-") as file:
            reserve(file.fileno(), size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise HarnessError(
            f"no room for a vector of {size >> 20} MiB in {tempfile.gettempdir()} "
            f"({error.strerror}), and memory is short; set TMPDIR to a folder of a "
            "larger file system, which is no memory"
        ) from error


_in_memory = _Reused(_huge_pages)
_in_files = _Reused(_file)


@contextmanager
def reused() -> Iterator[None]:
    """Keep the memory that vectors leave for the next ones, until the context ends."""
    _in_memory.open()
    _in_files.open()
    try:
        yield
    finally:
        _in_memory.close()
        _in_files.close()
