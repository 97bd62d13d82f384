"""Shards of a live model on this rank, read from the local tensors and never from an export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...compat import flat_parameters, local_index
from ...contract.flat import optimized, piece_shards
from ...contract.names import unwrapped
from ...contract.shard import Role, Shard
from ...drive.recorder import entry_of
from ...errors import UsageError
from ...machine.devices import CPU, placed
from ...optimizers import STATES
from ...protocol.observations import Entry
from .axes import Part, Parts
from .optimizers import JobOptimizers
from .zero_engine import ZeroEngine, zero_engine

DTYPES = (torch.float32, torch.bfloat16)
"""Of parameters whose update can be judged."""

UNWRAPPED = "one process"
"""Word for a model that no sharder of torch wraps."""

ShardsOf = Callable[[Role, torch.Tensor], Iterator[Shard]]


@dataclass(frozen=True)
class Holding:
    """A parameter, or this rank's shard of one.

    held: what the optimizer sees of it (a flat parameter of FSDP1 has many); shards(role, tensor):
    the shards of it in a tensor laid out as `held`; group: of the optimizer, where that does not
    have `held` between steps.
    """

    name: str
    held: torch.Tensor
    shards: ShardsOf
    group: int | None = None


def holdings(model: nn.Module, parts: Parts) -> list[Holding]:
    """Return all parameters of which this rank holds elements, in the order of the model.

    parts: what parameters are a part of that no wrapper knows.

    FSDP2 gathers its root for a forward and keeps it until the backward; a root left gathered by a
    forward without a backward is freed first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    engine = zero_engine(model)
    if engine is not None:
        return [*_of_engine(engine)]
    found: list[Holding] = []
    known: set[int] = set()
    for flat in flat_parameters(model):
        known |= {id(flat.tensor), *map(id, (flat.originals or {}).values())}
        for piece in flat.pieces:
            found.append(
                Holding(
                    unwrapped(piece.name),
                    optimized(flat, piece),
                    partial(piece_shards, flat, piece),
                )
            )
    for wrapped, parameter in model.named_parameters():
        if id(parameter) not in known:
            part = parts.get(id(parameter))
            name = unwrapped(wrapped) if part is None else part.name
            found.append(Holding(name, parameter, partial(_whole, name, parameter, part)))
    return found


def _of_engine(engine: ZeroEngine) -> Iterator[Holding]:
    """Yield the masters, piece by piece, and the parameters that have none."""
    for number, part in enumerate(engine.partitions()):
        for piece in part.pieces:
            one = part._replace(pieces=[piece])
            yield Holding(piece.name, part.master, one.shards, engine.group_of(number))
    named, optimized = engine.named, engine.optimized
    for shard in engine.copies(parts=True):
        parameter = named[shard.name]
        if shard.tensor is not None and not (
            parameter.requires_grad and id(parameter) in optimized
        ):
            yield Holding(shard.name, parameter, partial(_without_master, shard))


def _without_master(shard: Shard, role: Role, tensor: torch.Tensor) -> Iterator[Shard]:
    data = shard.tensor if role == "parameter" else tensor.detach()
    if role != "parameter" and isinstance(shard.index, slice):  # a gradient is whole
        data = tensor.detach().reshape(-1)[shard.index]
    yield Shard(shard.name, role, data, shard.shape, shard.index)


def _whole(
    name: str, parameter: torch.Tensor, part: Part | None, role: Role, tensor: torch.Tensor
) -> Iterator[Shard]:
    index = local_index(parameter) if isinstance(parameter, DTensor) else None
    shard = Shard(name, role, local(tensor), tuple(parameter.shape), index)
    yield shard if part is None else part.placed(shard)


def computes_on(model: nn.Module) -> torch.device:
    """Device of the forward, which with offloading is not that of the parameters."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return module.compute_device or torch.device(CPU)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return placed(parameter.device_mesh.device_type)
        return parameter.device
    return torch.device(CPU)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, detached, from a private field.

    `to_local` may wait or differentiate.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, detached; a DTensor is put together, and all ranks of its mesh call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    found: torch.Tensor = tensor.full_tensor()
    return found.detach()


def reduced(gradient: torch.Tensor | None, held: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient laid out as its parameter: that of a DTensor can be a sum still to come.

    Every rank of its mesh calls this.
    """
    if not (isinstance(gradient, DTensor) and isinstance(held, DTensor)):
        return gradient
    same = gradient.placements == held.placements
    return gradient if same else gradient.redistribute(placements=held.placements)


def shards_of(
    holding: Holding, states: Mapping[Any, Mapping[str, Any]]
) -> Iterator[tuple[str, Shard]]:
    """Yield (role, shard) of the parameter and its moments."""
    for shard in holding.shards("parameter", holding.held):
        yield "parameter", shard
    state = states.get(holding.held) or {}
    for role in STATES:
        if role in state:
            for shard in holding.shards(role, state[role]):
                yield role, shard


def shards_changed_by_forwards(
    model: nn.Module, parts: Parts, left_out: Collection[int]
) -> Iterator[Shard]:
    """Yield shards that a forward changes in place: rows of an embedding with `max_norm`.

    left_out: ids of parameters that are not asked for.
    """
    changed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    }
    for holding in holdings(model, parts) if changed else ():
        if id(holding.held) in changed and id(holding.held) not in left_out:
            yield from holding.shards("parameter", holding.held)


def versions_of(found: Iterable[Holding]) -> dict[Entry, int]:
    """Return how often torch counted a change in place, for each shard of a parameter."""
    return {
        entry_of(shard): shard.tensor._version
        for holding in found
        for shard in holding.shards("parameter", holding.held)
        if shard.tensor is not None
    }


def count_of(holding: Holding, states: Mapping[Any, Mapping[str, Any]]) -> float | None:
    """Return the optimizer's step count for a parameter, None if it has no state of it."""
    state = states.get(holding.held)
    return None if not state or "step" not in state else float(state["step"])


def words_for(model: nn.Module, optimizers: JobOptimizers) -> str:
    """Name the sharder and the optimizers that are checked, such as "FSDP2 with AdamW"."""
    modules = list(model.modules())
    engine = zero_engine(model)
    if engine is not None:
        return f"ZeRO-{engine.stage} of DeepSpeed with {optimizers.name}"
    kind = UNWRAPPED
    if any(isinstance(module, FSDPModule) for module in modules):
        kind = "FSDP2"
    elif any(isinstance(module, FullyShardedDataParallel) for module in modules):
        kind = "FSDP1"
    elif any(isinstance(module, DistributedDataParallel) for module in modules):
        kind = "DDP"
    return f"{kind} with {optimizers.name}"


def check_parameters(model: nn.Module, optimizers: JobOptimizers) -> None:
    """Raise UsageError for optimizers of other parameters, or a dtype that cannot be judged."""
    owners = optimizers.owners
    held = [
        holding
        for holding in holdings(model, {})
        if holding.group is not None or id(holding.held) in owners
    ]
    known = {*map(id, model.parameters()), *(id(holding.held) for holding in held)}
    every = any(p.numel() for p in model.parameters()) and zero_engine(model) is None
    for optimizer in optimizers if every else ():
        these = [id(one) for group in optimizer.param_groups for one in group["params"]]
        if these and known.isdisjoint(these):
            kind = type(optimizer).__name__
            raise UsageError(
                f"none of the {len(these)} parameters of the {kind} is one of the model: an "
                "optimizer that is made before the model is wrapped keeps the parameters of "
                "before, and updates nothing; make it after wrapping, and attach after both"
            )
    for holding in held:
        several = optimizers.names_with(holding.held)
        if len(several) > 1:
            raise UsageError(
                f"{holding.name} is in several optimizers ({', '.join(several)}; allowed: one "
                "optimizer for each parameter)"
            )
    for holding in held:
        if holding.held.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            raise UsageError(f"{holding.name} is {holding.held.dtype} (allowed: {names})")
