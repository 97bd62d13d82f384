"""The layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from ...case.schema import Case
from ...case.shapes import uncalled
from ...contract.layout import Layout, Phase
from ..account import Account, Told, layout_of
from .bucket import Named, parts_of
from .partition import Partition, Piece, aligned

if TYPE_CHECKING:
    from .zero3 import Part


def bucket_layout(model: nn.Module, case: Case, rank: int, *, whole_gradients: bool) -> Layout:
    """Of ZeRO-1 (whole gradients) and ZeRO-2 (those of the shard): buckets of what trains, and
    frozen parameters as they are. The gradients are there from the start to the end."""
    account = Account(model, case)
    parts = parts_of(model, case)
    cut = [_cut(part, case) for part in parts]
    inside = {name for part in parts for name, _ in part}
    outside = sum(one.bytes for name, one in account.parameters.items() if name not in inside)
    flat = sum(one.numel * size for one, size in cut)
    shard = sum(one.shard_size * size for one, size in cut)
    pieces = [(piece, size) for one, size in cut for piece in one.pieces(rank % case.shards)]

    def told(step: int, phase: Phase) -> Told:
        return {
            "parameter": flat + outside,
            "gradient": flat if whole_gradients else shard,
            "optimizer": _states(account, pieces, step, phase),
            "buffer": account.buffers,
        }

    return layout_of(account, told)


def zero3_layout(
    model: nn.Module,
    case: Case,
    rank: int,
    modules: Sequence[nn.Module],
    units: Sequence[Sequence[Part]],
) -> Layout:
    """Of ZeRO-3: a shard of each flat parameter, and of its gradient if it learns.

    units: the flat parameters of each module, then of the root. After the forward the root is
    gathered, and so are the units that were called, if the case does not reshard.
    """
    account = Account(model, case)
    cut = [(part, *_cut(part.named, case)) for parts in units for part in parts]
    place = rank % case.shards
    pieces = [(p, size) for part, one, size in cut if part.learns for p in one.pieces(place)]
    idle = uncalled(case.model)
    paths = {module: f"{path}." for path, module in model.named_modules()}
    open_ = [not (case.sharding.reshard or paths[m].startswith(idle)) for m in modules]
    gathered = sum(
        one.numel * size
        for parts, stays in zip(units, (*open_, True), strict=True)
        if stays
        for one, size in (_cut(part.named, case) for part in parts)
    )

    def told(step: int, phase: Phase) -> Told:
        return {
            "parameter": sum(one.shard_size * size for _, one, size in cut),
            "gradient": sum(one.shard_size * size for part, one, size in cut if part.learns),
            "optimizer": _states(account, pieces, step, phase),
            "buffer": account.buffers,
            "gathered": gathered if phase == "forward" else 0,
        }

    return layout_of(account, told)


def _cut(named: Named, case: Case) -> tuple[Partition, int]:
    """The partition of some parameters of one dtype, and the bytes of an element."""
    size = named[0][1].element_size()
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    return Partition(shapes, case.shards, aligned(size)), size


def _states(account: Account, pieces: Iterable[tuple[Piece, int]], step: int, phase: Phase) -> int:
    """Bytes of AdamW's states of the pieces of one rank: all that learns has a gradient."""
    stateful = account.stateful(step, phase, account.learning)
    return sum(
        account.moments(piece.stop - piece.start, size)
        for piece, size in pieces
        if piece.name in stateful
    )
