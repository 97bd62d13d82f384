"""Shards of a rank's flat parameters as parts of the original ones, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ..compat import FlatHandle, FlatPiece
from .memory_order import boxes, in_memory_order, order_of
from .names import unwrapped
from .shard import Role, Shard
from .states import Full, States


def shards_of(flat: FlatHandle, states: States) -> Iterator[Shard]:
    """Iterate over parameters, gradients, moments, steps and padding of one flat parameter here.

    The optimizer has states of what it sees: of an original parameter, whose local view is 1-D, or
    of the flat one.
    """
    for piece in flat.pieces:
        held = optimized(flat, piece)
        yield from piece_shards(flat, piece, "parameter", held)
        if not held.requires_grad:
            continue
        if held.grad is None:
            yield Shard(unwrapped(piece.name), "gradient", None, piece.shape)
        else:
            yield from piece_shards(flat, piece, "gradient", held.grad)
        for role, tensor in states.moments(held):
            yield from piece_shards(flat, piece, role, tensor)
        count = states.count(held)
        if count is not None:
            yield Shard(unwrapped(piece.name), "step", count.detach(), ())
    held_flat = flat.tensor.detach()
    for gap in flat.padding:
        yield Shard("", "padding", held_flat[gap], tuple(held_flat.shape), gap)


def restore(flat: FlatHandle, full: Full, states: States) -> None:
    """Put whole tensors into the local shard and into the states."""
    for piece in flat.pieces:
        held = optimized(flat, piece)
        name = unwrapped(piece.name)
        _write(flat, piece, held.detach(), full[name, "parameter"])
        if held.requires_grad:
            states.restore(held, full, name, partial(_put, flat, piece, full, name))


def _put(
    flat: FlatHandle, piece: FlatPiece, full: Full, name: str, into: torch.Tensor, role: str
) -> None:
    _write(flat, piece, into, full[name, role])


def optimized(flat: FlatHandle, piece: FlatPiece) -> torch.nn.Parameter:
    """Return the parameter that the optimizer updates."""
    return flat.tensor if flat.originals is None else flat.originals[piece.name]


def _local(flat: FlatHandle, piece: FlatPiece, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor with the extent of the parameter that the optimizer updates."""
    tensor = tensor.detach()
    if flat.originals is None:
        return tensor[piece.offset : piece.offset + piece.numel]
    return tensor


def piece_shards(
    flat: FlatHandle, piece: FlatPiece, role: Role, tensor: torch.Tensor
) -> Iterator[Shard]:
    name = unwrapped(piece.name)
    local = _local(flat, piece, tensor)
    if not flat.sharded and flat.originals is not None:
        yield Shard(name, role, local, piece.shape)
        return
    order = order_of(piece.shape, piece.strides)
    back = tuple(order.index(dim) for dim in range(len(order)))
    if not flat.sharded:
        whole = local.view([piece.shape[dim] for dim in order]).permute(back)
        yield Shard(name, role, whole, piece.shape)
        return
    if order == tuple(range(len(order))):
        place = slice(piece.start, piece.start + piece.numel)
        yield Shard(name, role, local, piece.shape, place)
        return
    stop = piece.start + piece.numel
    for index, extent, low, high in boxes(piece.shape, order, piece.start, stop):
        part = local[low - piece.start : high - piece.start]
        yield Shard(name, role, part.view(extent).permute(back), piece.shape, index)


def _write(flat: FlatHandle, piece: FlatPiece, into: torch.Tensor, whole: torch.Tensor) -> None:
    local = _local(flat, piece, into)
    if not flat.sharded and flat.originals is not None:
        local.copy_(whole)
        return
    order = order_of(piece.shape, piece.strides)
    local.copy_(in_memory_order(whole, order)[piece.start : piece.start + piece.numel])
