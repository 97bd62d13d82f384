"""Layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.shapes import uncalled
from ...case.traits import reduced_precision
from ...contract.implementation import Stage
from ...models.blocks import DTYPES
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, CategoryBytes, layout_of
from ..shared.calls import with_collectives
from ..shared.units import unit_modules
from .bucket import parts_of
from .collectives import zero1, zero2
from .flat import Named, needs_whole
from .partition import Partition, aligned
from .unit import unit_parts
from .zero3_collectives import zero3


def layout_of_stage(stage: Stage, model: nn.Module, case: Case, rank: int) -> Layout | None:
    """Return the memory layout and collectives of a rank of ZeRO-1, -2 or -3.

    Its bytes are not predicted in fp16, where the data determine which steps overflow, and so when
    states are allocated.
    """
    if stage == 3:
        return with_collectives(_sharded(model, case, rank), zero3(model, case), case)
    calls = (zero1 if stage == 1 else zero2)(model, case)
    return with_collectives(_replicated(model, case, rank, stage), calls, case)


def _replicated(model: nn.Module, case: Case, rank: int, stage: Stage) -> Layout | None:
    """Return the layout of ZeRO-1 (whole gradients) or ZeRO-2 (gradients of the shard).

    Trainable parameters are in buckets, frozen ones are kept unchanged. The gradients are allocated
    from the start to the end.
    """
    account = Account(model, case)
    parts = parts_of(model, case)
    flats = [_flat(part, case) for part in parts]
    inside = {name for part in parts for name, _ in part}
    outside = sum(
        one.numel * sizes_of(case, one.itemsize).kept
        for name, one in account.parameters.items()
        if name not in inside
    )
    kept = outside + sum(one.numel * size.kept for one, size in flats)
    gradients = sum((o.numel if stage == 1 else o.shard_size) * s.gradient for o, s in flats)
    return _layout(account, flats, rank, kept, gradients)


def _sharded(model: nn.Module, case: Case, rank: int) -> Layout | None:
    """Return the layout of ZeRO-3: a shard of each flat parameter, and of its gradient if trained.

    After the forward the root is gathered, and so are the units that were called, if the case does
    not reshard.
    """
    modules = unit_modules(model, case.sharding)
    paths = {module: f"{path}." for path, module in model.named_modules()}
    idle = uncalled(case.model)
    stays = [not (case.sharding.reshard or paths[m].startswith(idle)) for m in modules]
    kept = gathered = 0
    learning = []
    for parts, stay in zip(unit_parts(model, case, modules), (*stays, True), strict=True):
        for part in parts:
            one, size = _flat(part.named, case)
            kept += one.shard_size * size.kept
            gathered += one.numel * size.kept if stay else 0
            if part.learns:
                learning.append((one, size))
    gradients = sum(one.shard_size * size.gradient for one, size in learning)
    return _layout(Account(model, case), learning, rank, kept, gradients, gathered)


def _layout(
    account: Account,
    learning: Sequence[tuple[Partition, Sizes]],
    rank: int,
    kept: int,
    gradients: int,
    gathered: int = 0,
) -> Layout | None:
    """Return the layout of a rank from the bytes of parameters and gradients that it keeps.

    learning: the flat buffers that the optimizer updates; gathered: bytes after the forward. None
    also if some rank's masters are padding alone, which no rank exposes.
    """
    case = account.case
    hidden = any(
        size.master and not one.pieces(other)
        for one, size in learning
        for other in range(case.axes.size("shard"))
    )
    if case.precision.compute == "fp16" or hidden:
        return None
    masters = sum(one.shard_size * size.master for one, size in learning)
    owned = [(one, size, one.pieces(case.axes.coordinate(rank, "shard"))) for one, size in learning]

    def predict(step: int, phase: Phase) -> CategoryBytes:
        trains = account.learning(step) if phase == "backward" else ()
        widened = sum(
            one.shard_size * size.widened
            for one, size, pieces in owned
            if any(piece.name in trains for piece in pieces)
        )
        stateful = account.stateful(step, phase, account.learning)
        states = sum(
            account.moments(piece.stop - piece.start, size.state, piece.name)
            for _, size, pieces in owned
            for piece in pieces
            if piece.name in stateful
        )
        return {
            "parameter": kept + masters,
            "gradient": gradients + widened,
            "optimizer": states,
            "buffer": account.buffers,
            "gathered": gathered if phase == "forward" else 0,
        }

    return layout_of(account, predict)


class Sizes(NamedTuple):
    """Bytes of an element: of what is computed with, of its gradient, of a moment; of its master
    and of its gradient as the optimizer takes it, 0 where it has none."""

    kept: int
    gradient: int
    state: int
    master: int = 0
    widened: int = 0


def sizes_of(case: Case, itemsize: int) -> Sizes:
    """Return the sizes for a parameter of `itemsize` bytes per element: see precision.py."""
    if not reduced_precision(case):
        return Sizes(itemsize, itemsize, itemsize)
    kept = DTYPES[case.precision.compute].itemsize
    gradient = DTYPES[case.precision.reduce].itemsize
    return Sizes(kept, gradient, itemsize, itemsize, 0 if gradient == itemsize else itemsize)


def _flat(named: Named, case: Case) -> tuple[Partition, Sizes]:
    """Partition parameters of one dtype; return it with the bytes per element."""
    size = sizes_of(case, named[0][1].element_size())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    ranks, whole = case.axes.size("shard"), needs_whole(named, case)
    return Partition(shapes, ranks, aligned(size.kept), whole=whole), size
