"""torch's own wrappers as a user writes them first, with torch's defaults."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import zerocheck


def ddp(model, case, mesh):
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
    return zerocheck.Built(wrapped, torch.optim.AdamW(zerocheck.groups(wrapped, case)))


ddp.stage = 0


def _fsdp1(model, case, mesh, **options):
    kinds = {type(block) for block in model.blocks}
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(kinds) if kinds else None,
        device_id=torch.device(mesh.device_type),
        **options,
    )
    return zerocheck.Built(
        wrapped, torch.optim.AdamW(zerocheck.groups(wrapped, case)), clip=wrapped.clip_grad_norm_
    )


def fsdp1(model, case, mesh):
    return _fsdp1(model, case, mesh, process_group=mesh.get_group(), use_orig_params=True)


def fsdp1_flat(model, case, mesh):
    return _fsdp1(model, case, mesh, process_group=mesh.get_group(), use_orig_params=False)


def fsdp1_mesh(model, case, mesh):
    return _fsdp1(model, case, mesh, device_mesh=mesh, use_orig_params=True)


def fsdp2(model, case, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))


fsdp2.stage = 3
