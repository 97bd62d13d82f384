"""Copying of the shards that an implementation exposes into the rank's arena."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch

from ..case.schema import Case, Optimizer
from ..contract.shard import OF_NO_STATE, Shard
from ..optimizers import STATES, factored, rule_of, states_of
from ..protocol.observations import Entry, Lie, Point, Recorded

ADAMW = Optimizer()

GRADIENT_ROLES = frozenset(("gradient",))


def state_roles(case: Case) -> frozenset[str]:
    """Return the roles of all that is state: whatever optimizer of torch is there, it is seen."""
    return frozenset(("parameter", "master", *STATES, *states_of(case.optimizer), "step", "buffer"))


class ArenaSlot(Protocol):
    """Location in an arena: offset in bytes, numel in elements."""

    @property
    def offset(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class Store(Protocol):
    """Interface of an arena for the recorder."""

    def put(self, tensors: Sequence[torch.Tensor]) -> ArenaSlot: ...


class Recorder:
    """Recorder of shards and the manifests that they refer to, each distinct manifest once."""

    def __init__(self, store: Store, options: Optimizer = ADAMW) -> None:
        """Record into a store. options: of the optimizer, whose factored states are expanded."""
        self._store = store
        self._options = options if factored(options) else None
        self._manifests: dict[tuple[Entry, ...], int] = {}
        self._entries: dict[tuple[object, ...], Entry] = {}
        self.records: list[Recorded] = []
        self.memory: tuple[Lie, ...] = ()

    @property
    def manifests(self) -> tuple[tuple[Entry, ...], ...]:
        """All manifests, in the order of their numbers."""
        return tuple(self._manifests)

    def take(
        self, step: int, point: Point, shards: Iterable[Shard], roles: Collection[str]
    ) -> None:
        """Copy the shards of these roles now; the implementation may change them afterwards."""
        batches: dict[tuple[str, str], tuple[list[Entry], list[torch.Tensor]]] = {}
        for shard in shards:
            if shard.role not in roles:
                continue
            if self._options is not None:
                shard = expanded(shard, self._options)
            dtype = "none" if shard.tensor is None else str(shard.tensor.dtype)
            batch = batches.get((shard.role, dtype))
            if batch is None:
                batch = batches[shard.role, dtype] = ([], [])
            batch[0].append(self._entry(shard))
            if shard.tensor is not None:
                batch[1].append(shard.tensor)
        for (role, dtype), (entries, tensors) in batches.items():
            manifest = self._manifests.setdefault(tuple(entries), len(self._manifests))
            if tensors:
                slot = self._store.put(tensors)
                place = slot.offset, slot.numel, slot.dtype
            else:
                place = 0, 0, dtype
            self.records.append(Recorded(step, point, role, manifest, *place))

    def lay(self, shards: Iterable[Shard]) -> None:
        """Record the memory locations of parameters and padding, for the diagnosis."""
        storages: dict[int, int] = {}
        found: list[Lie] = []
        for shard in shards:
            tensor, span = shard.tensor, shard.flat_range()
            if shard.role not in ("parameter", "padding") or tensor is None or span is None:
                continue
            storage = tensor.untyped_storage()
            size = tensor.element_size()
            if not storage.nbytes() or not tensor.is_contiguous():
                continue
            number = storages.setdefault(storage.data_ptr(), len(storages))
            place = number, storage.nbytes() // size, int(tensor.storage_offset())
            found.append(Lie(shard.name, *span, *place, shard.role == "padding"))
        self.memory = tuple(found)

    def _entry(self, shard: Shard) -> Entry:
        index = shard.index
        tensor = shard.tensor
        local = None if tensor is None else tensor.shape
        # Slices cannot be hashed on Python 3.11: spelled out.
        place: object
        if index is None:
            place = None
        elif isinstance(index, slice):
            place = index.start, index.stop
        else:
            place = tuple([(part.start, part.stop) for part in index])
        key = (shard.name, shard.shape, place, local)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = entry_of(shard)
        return entry


def expanded(shard: Shard, options: Optimizer) -> Shard:
    """Return a factored state with an element for each of the parameter's in the shard's index.

    A state that every rank has whole, of sharded rows, is that of the rank's rows. Any other shard
    is returned as it is, and so is a state of a shape that does not fit.
    """
    if shard.tensor is None or shard.role in OF_NO_STATE:
        return shard
    rule = rule_of(options, shard.name, shard.shape)
    shape = rule.state_shape(shard.role, len(shard.shape))
    if shape is None or not shape.reduced:
        return shard
    index: tuple[slice, ...] = (slice(None),) * len(shard.shape)
    if isinstance(shard.index, tuple):
        index = shard.index
    elif shard.flat_range() != (0, math.prod(shard.shape)):
        return shard
    extent = [len(range(*part.indices(n))) for part, n in zip(index, shard.shape, strict=True)]
    for extents in (extent, shard.shape):
        with suppress(ValueError):
            state = shape.expanded(shard.tensor, extents)
            return replace(shard, tensor=state if extents is extent else state[index])
    return shard


def entry_of(shard: Shard) -> Entry:
    """Return a shard's entry, after a check of the tensor's extent against its index.

    Raises ValueError, which becomes the verdict `crashed` with this text.
    """
    flat = shard.flat_range()
    box = None
    if flat is None:
        assert isinstance(shard.index, tuple)
        bounds = [part.indices(size) for part, size in zip(shard.index, shard.shape, strict=True)]
        box = tuple((low, max(low, high)) for low, high, _ in bounds)
        count = 1
        for low, high in box:
            count *= high - low
        flat = (0, count)
    if shard.tensor is not None and shard.tensor.numel() != flat[1] - flat[0]:
        raise ValueError(
            f"shards() gave {shard.role} of {shard.name!r} with {shard.tensor.numel()} elements "
            f"(shape {tuple(shard.tensor.shape)}) for an index of {flat[1] - flat[0]} elements: "
            f"{shard.index}"
        )
    return Entry(shard.name, shard.shape, *flat, box, shard.tensor is not None)
