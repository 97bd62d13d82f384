"""DeepSpeed in a rank process that also runs others: imported, made ready, and put back.

DeepSpeed keeps state of its own in modules and, with stage 3, changes torch. What an engine leaves
there is undone by `closed`, so that the next case of the process finds torch as it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it takes what device it finds

import deepspeed
from deepspeed.accelerator import real_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

__all__ = [
    "BF16_Optimizer",
    "Engine",
    "closed",
    "device",
    "ds_to_universal",
    "get_fp32_state_dict_from_zero_checkpoint",
    "make_engine",
    "on_device",
    "safe_get_full_fp32_param",
    "safe_get_full_optimizer_state",
    "silent",
]
"""The rest of this folder imports DeepSpeed from here, so that its device is chosen first."""

Engine = Any
"""A DeepSpeedEngine; DeepSpeed has no types."""

_RELEASING = "_PartitionedParameterCoordinator__params_to_release"
_joined: list[dist.ProcessGroup] = []
"""The world that DeepSpeed's own groups were made for."""


def device() -> str:
    """Return the type of the device that engines are on: the CPU, but for a simulation."""
    name: str = real_accelerator.get_accelerator().device_name()
    return name


@contextmanager
def on_device(kind: str) -> Iterator[None]:
    """Have engines within the context on a device without data, of this type."""
    from .device import DeviceWithoutData

    with mock.patch.object(real_accelerator, "ds_accelerator", DeviceWithoutData(kind)):
        yield


def make_engine(model: torch.nn.Module, config: dict[str, Any], **given: Any) -> Engine:
    """`deepspeed.initialize`, on the process group that there is. Every rank calls it.

    given: `optimizer`, or `model_parameters` for one that the config names.
    """
    _join()
    with silent():
        return deepspeed.initialize(model=model, config=config, **given)[0]


def _join() -> None:
    """Have DeepSpeed use the ranks' process group; once for each process group.

    Its operator for shared memory is left out: it would be compiled here, for minutes.
    """
    world = dist.group.WORLD
    assert world is not None
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    if _joined and _joined[0] is world:
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if _joined:  # groups of a world that is gone
        deepspeed_groups._release_process_group_references()
        deepspeed_comm.cdb = None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    _joined[:] = [world]


def closed(engine: Engine) -> None:
    """Destroy an engine, and undo its changes to DeepSpeed's modules.

    Stage 3 has a list of the modules that are being called, which keeps the model, and a cache of
    what to release, which keeps the engine. Optimizers give each parameter methods that are bound
    to it, and a reference to themselves: cycles that the collector cannot see through.
    """
    parameters, optimizer = list(engine.module.parameters()), engine.optimizer
    engine.destroy()
    for parameter in parameters:
        bound = [
            name
            for name, value in vars(parameter).items()
            if value is optimizer or getattr(value, "__self__", None) is parameter
        ]
        for name in bound:
            delattr(parameter, name)
    parameter_offload.FWD_MODULE_STACK.clear()
    releasing = vars(PartitionedParameterCoordinator)[_RELEASING]
    for cell in releasing.__closure__ or ():  # it is wrapped
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


@contextmanager
def silent() -> Iterator[None]:
    """Let DeepSpeed print its progress nowhere."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
