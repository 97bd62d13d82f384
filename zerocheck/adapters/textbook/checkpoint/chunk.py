"""Shard as a range of a flat tensor, in the terms of torch.distributed.checkpoint.

A checkpoint knows every tensor as a 1-D tensor in row-major order, cut in ranges. Where they are
cut is nobody's affair but the writer's: a reader asks for the range that it needs, and gets it from
however many ranges it lies in. So N ranks may write what M ranks read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ....errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `start + tensor.numel()` of the tensor `key`, which has `numel`.

    tensor: 1-D, memory that is written to a file or filled from one.
    """

    key: str
    tensor: torch.Tensor
    start: int
    numel: int

    @property
    def place(self) -> ChunkStorageMetadata:
        """Range of the chunk, as torch's metadata."""
        return ChunkStorageMetadata(torch.Size([self.start]), self.tensor.size())

    def copied(self) -> Chunk:
        """Return a chunk with a copy of the tensor."""
        return replace(self, tensor=self.tensor.detach().clone())


def whole(key: str, tensor: torch.Tensor) -> Chunk:
    """Return a chunk of a whole tensor of any shape, copied if it is not contiguous."""
    return Chunk(key, tensor.detach().reshape(-1), 0, tensor.numel())


class WritePlanner(DefaultSavePlanner):
    """Planner that writes chunks: the state of `dcp.save` is {key: Chunk}.

    Each range is written by one rank.
    """

    state_dict: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return the items that this rank writes."""
        self.plan = SavePlan([_write_item(chunk) for chunk in self.state_dict.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a chunk."""
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def _write_item(chunk: Chunk) -> WriteItem:
    properties = TensorProperties.create_from_tensor(chunk.tensor)
    described = TensorWriteData(chunk.place, properties, torch.Size([chunk.numel]))
    index = MetadataIndex(chunk.key, chunk.place.offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=described)


class ReadPlanner(DefaultLoadPlanner):
    """Planner that fills chunks: the state of `dcp.load` is {key: Chunk}.

    torch's own planner leaves memory as it was where the checkpoint has a gap, and casts where the
    dtype is another. Both are refused here.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take state and metadata from torch. Inherited, it would turn chunks into None."""
        assert metadata is not None
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return the items that this rank reads."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        return LoadPlan(
            [item for chunk in self.state_dict.values() for item in _read_items(chunk, stored)]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a chunk."""
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def _read_items(chunk: Chunk, stored: dict[str, Any]) -> Iterable[ReadItem]:
    found = stored.get(chunk.key)
    if not isinstance(found, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no {chunk.key}")
    given, needed = (found.size, found.properties.dtype), ((chunk.numel,), chunk.tensor.dtype)
    if given != needed:
        raise CheckpointError(f"{chunk.key} is {given} in the checkpoint, and {needed} here")
    items = create_read_items_for_chunk_list(chunk.key, found, [chunk.place])
    if sum(item.lengths.numel() for item in items) != chunk.tensor.numel():
        raise CheckpointError(f"the checkpoint has only a part of {chunk.key}")
    return items
