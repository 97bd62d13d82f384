"""Layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.shapes import uncalled
from ...case.traits import reduced_precision
from ...contract.layout import Layout, Phase
from ...models.blocks import DTYPES
from ..account import Account, CategoryBytes, layout_of
from .bucket import Named, parts_of
from .partition import Partition, Piece, aligned

if TYPE_CHECKING:
    from .zero3 import FlatUnit


def bucket_layout(
    model: nn.Module, case: Case, rank: int, *, whole_gradients: bool
) -> Layout | None:
    """Return the layout of ZeRO-1 (whole gradients) or ZeRO-2 (gradients of the shard).

    Trainable parameters are in buckets, frozen ones are kept unchanged. The gradients are allocated
    from the start to the end.

    None in fp16, where the data determine which steps overflow, and so when states are allocated.
    """
    account = Account(model, case)
    parts = parts_of(model, case)
    cut = [_cut(part, case) for part in parts]
    if case.precision.compute == "fp16" or _masters_of_padding(cut, case):
        return None
    inside = {name for part in parts for name, _ in part}
    outside = sum(
        one.numel * sizes_of(case, one.itemsize).kept
        for name, one in account.parameters.items()
        if name not in inside
    )
    flat = sum(one.numel * size.kept for one, size in cut)
    place = rank % case.shards
    masters = sum(one.shard_size * size.master for one, size in cut)
    gradients = sum(
        (one.numel if whole_gradients else one.shard_size) * size.gradient for one, size in cut
    )
    pieces = [(piece, size.state) for one, size in cut for piece in one.pieces(place)]

    def predict(step: int, phase: Phase) -> CategoryBytes:
        return {
            "parameter": flat + outside + masters,
            "gradient": gradients + _widened(account, cut, place, step, phase),
            "optimizer": _states(account, pieces, step, phase),
            "buffer": account.buffers,
        }

    return layout_of(account, predict)


def zero3_layout(
    model: nn.Module,
    case: Case,
    rank: int,
    modules: Sequence[nn.Module],
    units: Sequence[Sequence[FlatUnit]],
) -> Layout | None:
    """Return the layout of ZeRO-3: a shard of each flat parameter, and of its gradient if trained.

    units: the flat parameters of each module, then of the root. After the forward the root is
    gathered, and so are the units that were called, if the case does not reshard. None in fp16, as
    for the other stages.
    """
    account = Account(model, case)
    cut = [(part, *_cut(part.named, case)) for parts in units for part in parts]
    place = rank % case.shards
    learning = [(one, size) for part, one, size in cut if part.learns]
    if case.precision.compute == "fp16" or _masters_of_padding(learning, case):
        return None
    pieces = [(p, size.state) for one, size in learning for p in one.pieces(place)]
    masters = sum(one.shard_size * size.master for one, size in learning)
    gradients = sum(one.shard_size * size.gradient for one, size in learning)
    idle = uncalled(case.model)
    paths = {module: f"{path}." for path, module in model.named_modules()}
    open_ = [not (case.sharding.reshard or paths[m].startswith(idle)) for m in modules]
    gathered = sum(
        one.numel * size.kept
        for parts, stays in zip(units, (*open_, True), strict=True)
        if stays
        for one, size in (_cut(part.named, case) for part in parts)
    )

    def predict(step: int, phase: Phase) -> CategoryBytes:
        return {
            "parameter": sum(one.shard_size * size.kept for _, one, size in cut) + masters,
            "gradient": gradients + _widened(account, learning, place, step, phase),
            "optimizer": _states(account, pieces, step, phase),
            "buffer": account.buffers,
            "gathered": gathered if phase == "forward" else 0,
        }

    return layout_of(account, predict)


class Sizes(NamedTuple):
    """Bytes of an element: of what is computed with, of its gradient, of a moment; of its master
    and of its gradient as AdamW takes it, 0 where it has none."""

    kept: int
    gradient: int
    state: int
    master: int = 0
    widened: int = 0


def sizes_of(case: Case, itemsize: int) -> Sizes:
    """Return the sizes for a parameter of `itemsize` bytes per element: see master.py."""
    if not reduced_precision(case):
        return Sizes(itemsize, itemsize, itemsize)
    kept = DTYPES[case.precision.compute].itemsize
    gradient = DTYPES[case.precision.reduce].itemsize
    return Sizes(kept, gradient, itemsize, itemsize, 0 if gradient == itemsize else itemsize)


def _cut(named: Named, case: Case) -> tuple[Partition, Sizes]:
    """Partition parameters of one dtype; return it with the bytes per element."""
    size = sizes_of(case, named[0][1].element_size())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    return Partition(shapes, case.shards, aligned(size.kept)), size


def _masters_of_padding(cut: Sequence[tuple[Partition, Sizes]], case: Case) -> bool:
    """Return True if some rank's masters are padding alone, which no rank exposes."""
    ranks = range(case.shards)
    return any(size.master and not one.pieces(rank) for one, size in cut for rank in ranks)


def _widened(
    account: Account, cut: Sequence[tuple[Partition, Sizes]], place: int, step: int, phase: Phase
) -> int:
    """Bytes of the gradients cast for AdamW, for shards in which it updates anything."""
    if phase != "backward":
        return 0
    learning = set(account.learning(step))
    return sum(
        one.shard_size * size.widened
        for one, size in cut
        if any(piece.name in learning for piece in one.pieces(place))
    )


def _states(account: Account, pieces: Iterable[tuple[Piece, int]], step: int, phase: Phase) -> int:
    """Bytes of AdamW's states of the pieces of one rank: all trainable pieces have a gradient."""
    stateful = account.stateful(step, phase, account.learning)
    return sum(
        account.moments(piece.stop - piece.start, size)
        for piece, size in pieces
        if piece.name in stateful
    )
