"""torch only: FSDP1's HYBRID_SHARD reduces nothing where the shard axis has one rank.

    python fsdp1_hybrid_shard_of_one_rank.py

Two replicas of one rank each. The gradient should be the mean over both; each rank keeps its own,
divided by two.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

REPLICAS = 2
INPUTS = (1.0, 10.0)


def run(rank: int, rendezvous: str, found: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=REPLICAS,
        timeout=timedelta(seconds=10),
    )
    mesh = init_device_mesh("cpu", (REPLICAS, 1), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    model(torch.full((1, 1), INPUTS[rank])).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    right = sum(INPUTS) / REPLICAS
    print(f"rank {rank}: gradient {gradient.item()}, right is {right}", flush=True)
    if gradient.item() != right:
        open(found, "w").close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous", f"{folder}/found"), nprocs=REPLICAS)
        try:
            open(f"{folder}/found").close()
        except FileNotFoundError:
            sys.exit(0)
        sys.exit(1)
