"""One safetensors file, read and written without the safetensors package.

The form: 8 bytes, little endian, with the length of the header; the header, JSON, with dtype,
shape and byte range of each tensor; the bytes, row-major. The ranges must tile the rest of the
file exactly. Nothing in it can be executed. (https://huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from .source import Key, OpenCheckpoint, Stored, StoredBox, shape_problem

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on the CPU to a file, by name, without a copy of all of them."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = _HeaderEntry(_NAMES[tensor.dtype], list(tensor.shape), (begin, end))
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile(OpenCheckpoint):
    """An opened safetensors file; see `Source`."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ordered = False  # writers sort by dtype and name
        self.verified.append("the header of safetensors, and that its tensors fill the file")
        self.unverifiable.append("values (safetensors has no checksums)")
        self._name = path.name
        self._begins: dict[Key, int] = {}
        self._map: mmap.mmap | None = None
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise msgspec.DecodeError("the header is truncated")
                header = msgspec.json.decode(file.read(length), type=dict[str, Any])
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _HeaderEntry])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.wrong("readable", self._name, f"its header is damaged: {error}")
            return
        self._entries(entries, 8 + length, size)

    def _entries(self, entries: dict[str, _HeaderEntry], begin: int, size: int) -> None:
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            start, stop = entry.data_offsets
            dtype = _DTYPES.get(entry.dtype)
            if dtype is None:
                self.wrong("readable", name, f"unknown dtype {entry.dtype}")
            elif problem := shape_problem(entry.shape, dtype):
                self.wrong("readable", name, problem)
            elif start < 0 or math.prod(entry.shape) * dtype.itemsize != stop - start:
                self.wrong(
                    "readable", name, f"bytes {start} to {stop} for {entry.shape} {entry.dtype}"
                )
            elif begin + stop > size:
                self.wrong("files", name, f"truncated: {size} bytes of {begin + stop}")
            else:
                shape = tuple(entry.shape)
                self.tensors[name,] = Stored(shape, dtype, (StoredBox((0,) * len(shape), shape),))
                self._begins[name,] = begin + start
            if start != end:
                what = "overlaps the one before" if start < end else "bytes before it are unnamed"
                self.wrong("files", name, what)
            end = max(end, stop)
        if size > begin + end:
            self.wrong("files", self._name, f"{size - begin - end} bytes behind its last tensor")

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`."""
        stored = self.tensors[key]
        if not stored.numel or self._map is None:
            return torch.empty(stored.shape, dtype=stored.dtype)
        start = self._begins[key]
        data = torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=stored.nbytes)
        if data.data_ptr() % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).view(stored.shape)

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        return frozenset({self._name})
