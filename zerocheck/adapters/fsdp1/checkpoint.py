"""Checkpoints of FSDP1 by its own state-dict types.

full     FULL_STATE_DICT and FSDP.optim_state_dict on rank 0, in one file; every rank reads it
sharded  SHARDED_STATE_DICT of ShardedTensors, by torch.distributed.checkpoint; the optimizer's is
         read by load_sharded_optimizer_state_dict

Parameters are never offloaded to the CPU: there it makes no copy, and FSDP1 frees the parameters
that it then reads, which kills ranks. The optimizer is offloaded, as is torch's default, where
`sharding.export_offload` asks for it; on the CPU FSDP1 then gathers exp_avg_sq over exp_avg.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ...contract.checkpoint import OtherStates, fit_rng, whole, write
from ...contract.names import unwrapped
from ..shared import full_checkpoint as file

Optimizer = torch.optim.Optimizer


@contextmanager
def _full(model: nn.Module, *, rank0_only: bool, offload: bool = False) -> Iterator[None]:
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
    ):
        yield


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield


def save_full(
    model: nn.Module, optimizer: Optimizer, states: OtherStates, directory: str, *, offload: bool
) -> None:
    """Save the full state in one file."""
    file.write(directory, _whole_states(model, optimizer, offload=offload), states)


def load_full(model: nn.Module, optimizer: Optimizer, states: OtherStates, directory: str) -> None:
    """Load the file of `save_full`; other state read from it is put into `states`."""
    found = file.read(directory)
    with _full(model, rank0_only=False):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"])
        )
    states.clear()
    states.update((name, found[name]) for name in found if name not in ("model", "optimizer"))


def save_sharded(
    model: nn.Module, optimizer: Optimizer, states: OtherStates, directory: str
) -> None:
    """One file per rank, never in the background: `dcp.async_save` refuses ShardedTensors."""
    with _sharded(model):
        held = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    write({**held, **states}, directory, background=False)


def load_sharded(
    model: nn.Module, optimizer: Optimizer, states: OtherStates, directory: str
) -> None:
    """Load the files of `save_sharded`; other state read from them is put into `states`."""
    reader = FileSystemReader(directory)
    fit_rng(states, reader.read_metadata().state_dict_metadata)
    with _sharded(model):
        held = model.state_dict()
        state_dict_loader.load({"model": held}, storage_reader=reader)
        model.load_state_dict(held)
        moments: Any = load_sharded_optimizer_state_dict(held, "optimizer", reader)
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, moments["optimizer"])
        )
    state_dict_loader.load(states, storage_reader=reader)


def export(
    model: nn.Module, optimizer: Optimizer, names: Collection[str], *, offload: bool
) -> Mapping[tuple[str, str], torch.Tensor]:
    """Export the FULL_STATE_DICT on rank 0, {} elsewhere."""
    states = _whole_states(model, optimizer, offload=offload)
    if not states:
        return {}
    buffers = {unwrapped(name) for name, _ in model.named_buffers()}
    return whole(states["model"], states["optimizer"]["state"], names, buffers, unwrapped)


def _whole_states(model: nn.Module, optimizer: Optimizer, *, offload: bool) -> dict[str, Any]:
    """Return the whole optimizer states on rank 0, {} elsewhere."""
    with _full(model, rank0_only=True, offload=offload):
        held = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    return held if dist.get_rank() == 0 else {}
