"""Whole vectors of a large model: in memory while half of it is left, else in files.

The pages of a file make way when memory is short. So what the judge needs of memory is what the
reference itself holds, and pieces; a vector as long as the model needs room in the folder of
TMPDIR. Vectors that are small, of all models that cases draw, are plain tensors.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..errors import HarnessError
from ..machine.host import FULL, leaves_half, reserve

LARGE_BYTES = 1 << 26
"""Bytes from which on a vector may lie in a file."""
HUGE_BYTES = 1 << 22
"""Bytes from which on a vector lies in huge pages, if it is in memory."""
AT_ONCE = 1 << 20


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate an uninitialised tensor. Raises HarnessError where there is no room for it."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size >= LARGE_BYTES and not leaves_half(size):
        return _in_file(count, dtype).view(shape)
    if size >= HUGE_BYTES:
        return _in_huge_pages(size).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


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


def _in_huge_pages(size: int) -> torch.Tensor:
    """Return so many bytes in huge pages, where the system has them.

    A page fault every 4 KiB takes four times as long as the copy that causes it. torch asks for
    huge pages only where the environment of the process tells it to.
    """
    page = 1 << 21
    memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % page :][:size]


def _in_file(count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * dtype.itemsize
    try:
        with tempfile.TemporaryFile(prefix="zerocheck-") as file:
            reserve(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise HarnessError(
            f"no room for a vector of {size >> 20} MiB in {tempfile.gettempdir()} "
            f"({error.strerror}), and half of the memory is taken; set TMPDIR to a folder of a "
            "larger file system, which is no memory"
        ) from error
    return torch.frombuffer(memory, dtype=dtype, count=count)
