"""Protocol of formats: the content of a checkpoint, read one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from .result import UNREAD, CheckpointProblem

Key = tuple[str | int, ...]
"""The way to a leaf through nested mappings and lists: ("optim", "state", 0, "step")."""


_MOST_DIMS = 64
"""Largest number of dims of a tensor that torch computes with."""
_DEEPEST = 100
_MOST_LEAVES = 1 << 22
_MOST_BITS = 4096
"""Largest number of bits of a stored number; states of random generators have some hundred."""
_SMALL = 1 << 28
"""Bytes of a tensor that may repeat what is stored of it."""


class DamagedCheckpoint(Exception):
    """Error for a stored tensor that cannot be read; its message is a short reason."""

    file = ""
    """Missing file that is all that is wrong, or ""."""


class MissingFile(DamagedCheckpoint):
    """Error for a stored tensor whose file is missing."""

    def __init__(self, file: str) -> None:
        super().__init__(f"its file {file} is missing")
        self.file = file


class StoredBox(NamedTuple):
    """Box of a tensor: its offset and its size, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


@dataclass(frozen=True)
class Stored:
    """A tensor as the checkpoint's index describes it, not read yet.

    shape: of the whole tensor; chunks: the boxes that are stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredBox, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class CheckpointSource(Protocol):
    """An opened checkpoint.

    format: its name, for people; tensors: every tensor by its key; values: every other leaf
    (numbers, words, tuples, lists of them); findings: what is wrong with its files and its index;
    notes: what was left out and why; ordered: whether the tensors have the order of the state dict;
    verified, unverifiable: what this form of files lets be verified, and what not. loads: on which
    numbers of ranks what is intact can be loaded.
    """

    format: str
    ordered: bool
    tensors: dict[Key, Stored]
    values: dict[Key, object]
    findings: list[CheckpointProblem]
    notes: list[str]
    verified: list[str]
    unverifiable: list[str]
    loads: str

    def files_of(self, key: Key) -> frozenset[str]:
        """Names of the files that hold the tensor."""
        ...

    def read(self, key: Key) -> torch.Tensor:
        """Read the whole tensor on the CPU. Raises Damaged; a gap between chunks is not filled."""
        ...


class OpenCheckpoint:
    """State that every format fills in while it opens a checkpoint; see `Source`."""

    loads = "on any number of ranks"

    def __init__(self) -> None:
        self.ordered = True
        self.tensors: dict[Key, Stored] = {}
        self.values: dict[Key, object] = {}
        self.findings: list[CheckpointProblem] = []
        self.notes: list[str] = []
        self.verified: list[str] = []
        self.unverifiable: list[str] = []

    def wrong(self, check: str, where: str, detail: str, *, file: str = "") -> None:
        """Add a finding. file: a missing one that it follows from."""
        self.findings.append(CheckpointProblem(check=check, where=where, detail=detail, file=file))

    def value(self, key: Key, leaf: object) -> None:
        """Take a leaf that is no tensor, or one that is not read, which is a finding."""
        if isinstance(leaf, NotRead):
            self.wrong(UNREAD, dotted(key), str(leaf))
        else:
            self.values[key] = leaf


def whole(tensor: torch.Tensor) -> Stored:
    """Describe a tensor that is stored in one piece."""
    shape = tuple(tensor.shape)
    return Stored(shape, tensor.dtype, (StoredBox((0,) * len(shape), shape),))


def dotted(key: Key) -> str:
    """Join a key to one name: "optim.state.0.step"."""
    return ".".join(map(str, key))


def shape_problem(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return why torch can have no tensor of this shape, or an empty text.

    A tensor without elements is checked too.
    """
    if len(shape) > _MOST_DIMS:
        return f"it has {len(shape)} dims, at most {_MOST_DIMS} can be"
    if min(shape, default=0) < 0:
        return f"its shape {list(shape)} has a negative size"
    if math.prod(max(1, size) for size in shape) * dtype.itemsize >= 1 << 63:
        return "its shape takes more bytes than 64 bits count"
    return ""


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it has values of its own.

    Raises Damaged for one on the meta device, quantized, or far larger than its stored bytes.
    """
    if tensor.is_meta:
        raise DamagedCheckpoint("it is on the meta device, so it has no values")
    if tensor.is_quantized:
        raise DamagedCheckpoint("it is quantized, which is not read")
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.dtype.itemsize > max(_SMALL, stored):
        raise DamagedCheckpoint(
            f"its shape {list(tensor.shape)} repeats the {stored} bytes that are stored"
        )
    return tensor.detach()


def leaves(tree: object) -> list[tuple[Key, object]]:
    """Return every leaf, with its key, of nested mappings and lists.

    Lists count as nested if they hold mappings or tensors: betas and lists of names stay whole. An
    empty mapping has no leaf. Raises Damaged for a tree that contains itself, or is too deep, or
    too large, or has numbers of thousands of digits.
    """
    walk = _TreeWalk()
    return list(walk.leaves(tree, ()))


class NotRead(str):
    """Tensor whose values are not read, in words: it is neither checked nor compared."""

    __slots__ = ()


def _unread(tensor: torch.Tensor) -> str:
    """Return why the values of a tensor cannot be read, or an empty text."""
    if tensor.is_nested:
        return "it is a nested tensor, which is not read"
    if tensor.layout is not torch.strided:
        return f"it is a tensor of layout {tensor.layout}, which is not read"
    try:
        torch.empty(1, dtype=tensor.dtype).to(torch.float64)
    except (RuntimeError, NotImplementedError):
        return f"its dtype {tensor.dtype} is not read: torch does not convert it"
    return ""


class _TreeWalk:
    """Walk through a foreign tree, in which one object can occur in many places."""

    def __init__(self) -> None:
        self._left = _MOST_LEAVES

    def leaves(self, tree: object, above: Key) -> Iterator[tuple[Key, object]]:
        self._count(len(above))
        if isinstance(tree, Mapping):
            for name, child in tree.items():
                yield from self.leaves(child, (*above, _part(name)))
        elif isinstance(tree, list | tuple) and any(
            isinstance(child, Mapping | torch.Tensor) for child in tree
        ):
            for index, child in enumerate(tree):
                yield from self.leaves(child, (*above, index))
        elif isinstance(tree, torch.Tensor) and (reason := _unread(tree)):
            yield above, NotRead(reason)
        else:
            self._value(tree, len(above))
            yield above, tree

    def _value(self, value: object, depth: int) -> None:
        self._count(depth)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise DamagedCheckpoint(f"a number of it has {value.bit_length()} bits")
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple | set | frozenset):
            for one in cast("Iterable[object]", value):
                self._value(one, depth + 1)

    def _count(self, depth: int) -> None:
        self._left -= 1
        if depth > _DEEPEST:
            raise DamagedCheckpoint("it is nested too deeply, or contains itself")
        if self._left < 0:
            raise DamagedCheckpoint(f"it has more than {_MOST_LEAVES} entries")


def _part(name: object) -> str | int:
    if isinstance(name, int):
        if name.bit_length() > 64:
            raise DamagedCheckpoint(f"a key of it is a number of {name.bit_length()} bits")
        return name
    return name if isinstance(name, str) else repr(name)[:1000]
