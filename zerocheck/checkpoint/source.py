"""The Protocol of formats: what a checkpoint holds, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .result import Finding

Key = tuple[str | int, ...]
"""The way to a leaf through nested mappings and lists: ("optim", "state", 0, "step")."""


class Damaged(Exception):
    """A stored tensor cannot be read; the message says why, in a few words."""


class Chunk(NamedTuple):
    """A box of a tensor: where it begins and how far it reaches, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor as the checkpoint's index describes it, not read yet.

    shape: of the whole tensor; chunks: the boxes that are stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Source(Protocol):
    """An opened checkpoint.

    format: its name, for people; tensors: every tensor by its key; values: every other leaf
    (numbers, words, tuples, lists of them); findings: what is wrong with its files and its index;
    notes: what was left out and why; ordered: whether the tensors have the order of the state dict.
    """

    format: str
    ordered: bool
    tensors: dict[Key, Stored]
    values: dict[Key, object]
    findings: list[Finding]
    notes: list[str]

    def read(self, key: Key) -> torch.Tensor:
        """The whole tensor on the CPU. Raises Damaged; a gap between chunks is not filled."""
        ...


class Opened:
    """What every format fills in as it opens a checkpoint; see `Source`."""

    def __init__(self) -> None:
        self.ordered = True
        self.tensors: dict[Key, Stored] = {}
        self.values: dict[Key, object] = {}
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def wrong(self, check: str, where: str, detail: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(check=check, where=where, detail=detail))


def whole(tensor: torch.Tensor) -> Stored:
    """The description of a tensor that is stored in one piece."""
    shape = tuple(tensor.shape)
    return Stored(shape, tensor.dtype, (Chunk((0,) * len(shape), shape),))


def dotted(key: Key) -> str:
    """A key as one name: "optim.state.0.step"."""
    return ".".join(map(str, key))


def leaves(tree: object, above: Key = ()) -> Iterator[tuple[Key, object]]:
    """Every leaf of nested mappings, and of lists that hold mappings or tensors, with its key.

    Betas and lists of names stay whole. An empty mapping has no leaf.
    """
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from leaves(child, (*above, name if isinstance(name, int) else str(name)))
    elif isinstance(tree, list | tuple) and any(
        isinstance(child, Mapping | torch.Tensor) for child in tree
    ):
        for index, child in enumerate(tree):
            yield from leaves(child, (*above, index))
    else:
        yield above, tree
