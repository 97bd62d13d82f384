"""Size of a live model, and memory of a rank: what the figures of a job are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat import flat_parameters, precision_policies
from .records import ModelSize, RankMemory

_STATM = Path("/proc/self/statm")


def model_size(model: nn.Module, computes_on: torch.device) -> ModelSize:
    """Measure the model. computes_on: the device of its forward."""
    narrow = [one.param_dtype for one in precision_policies(model) if one.param_dtype]
    layers: dict[str, int] = {}
    parameters = list(_parameters(model))
    for one in parameters:
        layer = one.name.rpartition(".")[0]
        itemsize = min(one.held.dtype.itemsize, *(dtype.itemsize for dtype in narrow), 8)
        layers[layer] = layers.get(layer, 0) + one.numel * itemsize
    return ModelSize(
        layers=len(layers),
        tensors=sum(one.held.requires_grad for one in parameters),
        gathered=sum(layers.values()),
        largest=max(layers.values(), default=0),
        sharded=any(one.sharded for one in parameters),
        offloaded=any(_local(one.held).device.type != computes_on.type for one in parameters),
        compiled=any(_compiled(module) for module in model.modules()),
    )


class _WholeParameter(NamedTuple):
    """Parameter as it is before it is sharded. held: what the rank has of it."""

    name: str
    numel: int
    held: torch.Tensor
    sharded: bool


def _parameters(model: nn.Module) -> Iterator[_WholeParameter]:
    known: set[int] = set()
    for flat in flat_parameters(model):
        known |= {id(flat.tensor), *map(id, (flat.originals or {}).values())}
        for name, shape in zip(flat.names, flat.shapes, strict=True):
            yield _WholeParameter(name, prod(shape), flat.tensor, flat.sharded)
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            numel = getattr(parameter, "ds_numel", parameter.numel())
            less = _local(parameter).numel() < numel
            yield _WholeParameter(name, numel, parameter, less)


def rank_memory(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], activations: int | None
) -> RankMemory:
    """Measure the memory of this rank, without a synchronization of its accelerator."""
    parameters = [_local(parameter) for parameter in model.parameters()]
    known = {id(parameter) for parameter in model.parameters()}
    states = [_local(key) for each in optimizers for key in each.state if id(key) not in known]
    states += [
        _local(one)
        for each in optimizers
        for state in each.state.values()
        for one in state.values()
        if isinstance(one, torch.Tensor)
    ]
    there = torch.accelerator.is_available() and torch.accelerator.memory_reserved() > 0
    return RankMemory(
        parameters=_bytes(parameters),
        gradients=_bytes([_local(p) for p in model.parameters() if p.requires_grad]),
        states=_bytes(states),
        activations=activations,
        allocated=torch.accelerator.memory_allocated() if there else None,
        reserved=torch.accelerator.memory_reserved() if there else None,
        peak=torch.accelerator.max_memory_allocated() if there else None,
        resident=_resident(),
    )


def _resident() -> int | None:
    """Return the resident bytes of this process, of Linux's /proc."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor; a parameter of ZeRO-3 has it as `ds_tensor`."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return getattr(tensor, "ds_tensor", tensor)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the storages of tensors, each once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
