"""Layouts of ZeRO-1, -2 and -3: partitions of flat buffers, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...case.schema import Case
from ...case.shapes import uncalled
from ...case.traits import reduced_precision
from ...contract.implementation import Stage
from ...models.blocks import DTYPES
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, CategoryBytes, layout_of
from ..shared.calls import SIZES, with_collectives
from ..shared.units import unit_modules
from .collectives import FlatSpec, buckets, flat_of, zero1, zero2, zero3
from .unit import unit_parts


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
    flats = buckets(model, case)
    inside = {name for flat in flats for name in flat.names}
    narrow = DTYPES[case.precision.compute].itemsize if reduced_precision(case) else None
    outside = sum(
        one.numel * (narrow or one.itemsize)
        for name, one in account.parameters.items()
        if name not in inside
    )
    kept = outside + sum(flat.bytes for flat in flats)
    shards = case.axes.size("shard") if stage == 1 else 1
    gradients = shards * sum(flat.bytes_of_shard(flat.reduced) for flat in flats)
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
            flat = flat_of(part.named, case)
            kept += flat.bytes_of_shard(flat.dtype)
            gathered += flat.bytes if stay else 0
            if part.learns:
                learning.append(flat)
    gradients = sum(flat.bytes_of_shard(flat.reduced) for flat in learning)
    return _layout(Account(model, case), learning, rank, kept, gradients, gathered)


def _layout(
    account: Account,
    learning: Sequence[FlatSpec],
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
        flat.masters and not flat.partition.pieces(other)
        for flat in learning
        for other in range(case.axes.size("shard"))
    )
    if case.precision.compute == "fp16" or hidden:
        return None
    masters = sum(flat.bytes_of_shard(flat.updated) for flat in learning if flat.masters)
    mine = case.axes.coordinate(rank, "shard")
    owned = [(flat, flat.partition.pieces(mine)) for flat in learning]

    def predict(step: int, phase: Phase) -> CategoryBytes:
        trains = account.learning(step) if phase == "backward" else ()
        widened = sum(
            flat.bytes_of_shard(flat.updated)
            for flat, pieces in owned
            if flat.masters and SIZES[flat.reduced] != SIZES[flat.updated]
            if any(piece.name in trains for piece in pieces)
        )
        stateful = account.stateful(step, phase, account.learning)
        states = sum(
            account.moments(piece.stop - piece.start, SIZES[flat.updated], piece.name)
            for flat, pieces in owned
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
