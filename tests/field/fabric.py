"""Lightning Fabric: DDP, FSDP1's counterpart for models, and ModelParallelStrategy with FSDP2."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import zerocheck


def _fabric(strategy, mesh):
    return Fabric(accelerator="cpu", devices=mesh.size(), strategy=strategy)


def ddp(model, case, mesh):
    fabric = _fabric(DDPStrategy(find_unused_parameters=True), mesh)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(zerocheck.groups(model, case)))
    return zerocheck.Built(
        model, optimizer, accumulate=lambda last: fabric.no_backward_sync(model, enabled=not last)
    )


ddp.stage = 0


def _shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fsdp2(model, case, mesh):
    strategy = ModelParallelStrategy(_shard, data_parallel_size=mesh.size(), tensor_parallel_size=1)
    fabric = _fabric(strategy, mesh)
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(zerocheck.groups(model, case)))
    return zerocheck.Built(
        model, optimizer, accumulate=lambda last: fabric.no_backward_sync(model, enabled=not last)
    )
