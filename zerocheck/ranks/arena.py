"""The rank's side of an arena: tensors packed into a file that the parent maps too."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerocheck.errors import HarnessError
from zerocheck.machine.host import FULL, leaves, open_above, reserve
from zerocheck.ranks.view import KEPT_BYTES, Slot, align

FIRST_BYTES = 1 << 20
_DOUBLED_BYTES = 64 << 20
"""A larger one grows by an eighth, or by what is needed: what is reserved is taken."""
_SMALL_NUMEL = 1 << 15

_flatten: Callable[[Sequence[Tensor]], Tensor] | None = getattr(
    torch._utils, "_flatten_dense_tensors", None
)


class Arena:
    """Grows in steps, keeps its pages from job to job, moves when a file system is full.

    `directories` are tried in order; the last one needs no memory. Space is reserved before it is
    mapped: a full /dev/shm is an error here and not a SIGBUS in the middle of a copy. Not
    thread-safe.
    """

    def __init__(
        self,
        name: str,
        directories: Sequence[str],
        *,
        first_bytes: int = FIRST_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._name = name
        self._directories = list(directories)
        self._first_bytes = first_bytes
        self._kept_bytes = kept_bytes
        self._generation = itertools.count()
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._at = 0
        self.path = ""
        self.size = 0

    @property
    def used(self) -> int:
        """Bytes that the current job has filled."""
        return self._at

    def packed(self) -> bytes:
        """A copy of all slots, for a parent that cannot map the file."""
        return b"" if self._map is None else self._map[: self._at]

    def part(self, start: int, stop: int) -> bytes:
        """A copy of bytes that are filled. Raises ValueError for others."""
        if self._map is None or not 0 <= start <= stop <= self._at:
            raise ValueError(f"bytes {start} to {stop} lie outside of the arena")
        return self._map[start:stop]

    def reset(self) -> None:
        """Forget all slots. Pages stay, unless a job left very many.

        A large file is replaced and not truncated: the parent may still map it.
        """
        self._at = 0
        if self.size > self._kept_bytes:
            self.close()

    def close(self) -> None:
        """Give everything back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            _unlink(self.path)
        self._descriptor, self._map, self.path, self.size, self._at = -1, None, "", 0, 0

    def put(self, tensors: Sequence[Tensor]) -> Slot:
        """Pack tensors of one dtype, flattened in row-major order, back to back.

        They may be strided, 0-d or empty, and on any device. Raises TypeError for mixed dtypes,
        HarnessError when no directory has room.
        """
        if not tensors:
            return Slot(align(self._at), 0, "float32")
        dtype = tensors[0].dtype
        numel = 0
        on_cpu = True
        for tensor in tensors:
            if tensor.dtype is not dtype:
                raise TypeError(f"one slot holds one dtype, not {dtype} and {tensor.dtype}")
            if not tensor.is_cpu:
                on_cpu = False
            numel += tensor.numel()
        offset = align(self._at)
        name = _NAMES.get(dtype) or dtype_name(dtype)
        end = offset + numel * dtype.itemsize
        if end > self.size:
            self._grow(end)
        if numel:
            with torch.no_grad():
                view = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)
                if len(tensors) == 1:
                    view.view(tensors[0].shape).copy_(tensors[0])
                elif not on_cpu:
                    _copy_each(view, tensors)
                elif numel <= _SMALL_NUMEL and _flatten is not None:
                    # Half the time of cat() for many small ones, though it copies twice.
                    view.copy_(_flatten(tensors))
                else:
                    torch.cat([tensor.reshape(-1) for tensor in tensors], out=view)
        self._at = end
        return Slot(offset, numel, name)

    def _grow(self, needed: int) -> None:
        size = max(self.size, self._first_bytes)
        while size < needed:
            size = 2 * size if size < _DOUBLED_BYTES else max(needed, size + size // 8)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        reasons = []
        for place, directory in enumerate(self._directories):
            last = place == len(self._directories) - 1
            try:
                self._extend(directory, size, leave_room=not last)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                reasons.append(f"{directory}: {error.strerror}")
            else:
                # What was too full once is not asked again.
                del self._directories[:place]
                return
        raise HarnessError(
            f"no room for {size >> 20} MiB of observations of one rank ({'; '.join(reasons)}); "
            "set TMPDIR to a folder of a larger file system, which is no memory"
        )

    def _extend(self, directory: str, size: int, *, leave_room: bool) -> None:
        """Have `size` bytes in `directory`, moving there what is already packed."""
        if leave_room:
            _refuse_the_last_room(directory, size)
            _refuse_the_last_memory(directory, size, size - self.size)
        if self._descriptor >= 0 and os.path.dirname(self.path) == directory:
            reserve(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, size)
            self.size = size
            return
        path = os.path.join(directory, f"{self._name}.{next(self._generation)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = open_above(path, flags)
        try:
            reserve(descriptor, size)
            new = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            _unlink(path)
            raise
        packed = self._at
        if self._map is not None:
            with memoryview(self._map) as old, memoryview(new) as copy:
                copy[:packed] = old[:packed]
        self.close()
        self._descriptor, self._map, self.path, self.size = descriptor, new, path, size
        self._at = packed


def _refuse_the_last_room(directory: str, size: int) -> None:
    """A shared memory that is filled to the brim hurts every other program on the machine."""
    room = os.statvfs(directory)
    spare = min(room.f_blocks * room.f_frsize // 8, 256 << 20)
    if room.f_bavail * room.f_frsize < size + spare:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)


def _refuse_the_last_memory(directory: str, size: int, more: int) -> None:
    """Shared memory is memory: what is large leaves half of it to those who compute."""
    if size > KEPT_BYTES and not leaves(2, more):
        raise OSError(errno.ENOSPC, "half of the memory is to be left", directory)


def _copy_each(view: Tensor, tensors: Sequence[Tensor]) -> None:
    """From a GPU, on its current stream, and waiting for that alone.

    That is what the user's loop would see there if it looked. To wait for the whole GPU would hide
    it where the code under test does not wait for a stream of its own.
    """
    at = 0
    for tensor in tensors:
        count = tensor.numel()
        view[at : at + count].view(tensor.shape).copy_(tensor)
        at += count


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    name = str(dtype).removeprefix("torch.")
    _NAMES[dtype] = name
    return name
