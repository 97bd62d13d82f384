"""Hugging Face accelerate: DDP, and its FSDP1 and FSDP2 plugins, also where it ignores them."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType

import zerocheck


def _built(model, case, plugin=None, **options):
    """What `accelerator.prepare` makes. plugin: forced, since accelerate ignores it on the CPU."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    if plugin is not None:
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.device = torch.device("cpu")  # FSDP1 refuses "cpu:0"
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(zerocheck.groups(model, case)))
    return zerocheck.Built(
        model,
        optimizer,
        clip=lambda limit, kind: accelerator.clip_grad_norm_(model.parameters(), limit, kind),
    )


def ddp(model, case, mesh):
    return _built(model, case)


ddp.stage = 0


def ddp_unused(model, case, mesh):
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
    return _built(model, case, kwargs_handlers=[kwargs])


ddp_unused.stage = 0


def _plugin(version, model, **options):
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = str(version)
    names = sorted({type(block).__name__ for block in model.blocks}) or [type(model).__name__]
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=names,
        **options,
    )


def ignored_fsdp2(model, case, mesh):
    """What a user writes first: no fully_shard is called on the CPU, the model is in DDP."""
    return _built(model, case, fsdp_plugin=_plugin(2, model, reshard_after_forward=True))


def fsdp1(model, case, mesh):
    plugin = _plugin(1, model, use_orig_params=True, reshard_after_forward="FULL_SHARD")
    return _built(model, case, plugin)


def fsdp2(model, case, mesh):
    return _built(model, case, _plugin(2, model, reshard_after_forward=True))


# As trainers clip. torch's infinity norm fails where a rank holds no rows of a parameter.
fsdp2.fixed = {"training": {"norm": "2"}}
