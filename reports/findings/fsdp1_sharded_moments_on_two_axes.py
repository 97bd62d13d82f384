"""torch only: with HYBRID_SHARD the moments of a sharded checkpoint are loaded into other places.

    python fsdp1_sharded_moments_on_two_axes.py

Model and optimizer are saved and loaded as the documentation of load_sharded_optimizer_state_dict
shows it, on the same four ranks.
"""

import os
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))
warnings.simplefilter("ignore")

WORLD_SIZE = 4


def trained(mesh_shape: tuple[int, ...]) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model after one step; the moments count up from 1."""
    kind = ShardingStrategy.FULL_SHARD
    if len(mesh_shape) == 1:
        groups = dist.group.WORLD
    else:
        kind = ShardingStrategy.HYBRID_SHARD
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    model = FSDP(
        nn.Linear(1, 8, bias=False),
        process_group=groups,
        sharding_strategy=kind,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.0, 0.0))
    (model(torch.ones(1, 1)) * torch.arange(1.0, 9.0)).sum().backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[float]:
    """What this rank holds of exp_avg."""
    return [value for one in optimizer.state.values() for value in one["exp_avg"].tolist()]


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=20),
    )
    torch.set_num_threads(1)
    for mesh_shape in ((4,), (2, 2)):
        path = f"{folder}/{len(mesh_shape)}"
        model, optimizer = trained(mesh_shape)
        saved = moments(optimizer)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            states = {
                "model": model.state_dict(),
                "optimizer": FSDP.optim_state_dict(model, optimizer),
            }
            dcp.save(states, checkpoint_id=path)
            read = load_sharded_optimizer_state_dict(
                model_state_dict=states["model"],
                optimizer_key="optimizer",
                storage_reader=FileSystemReader(path),
            )
            found = FSDP.optim_state_dict_to_load(model, optimizer, read["optimizer"])
        optimizer.load_state_dict(found)
        loaded = moments(optimizer)
        every: list[tuple[list[float], list[float]]] = [([], [])] * WORLD_SIZE
        dist.all_gather_object(every, (saved, loaded))
        for number, (expected, got) in enumerate(every):
            if rank == 0:
                print(f"mesh {mesh_shape}, rank {number}: expected {expected}, got {got}")
        if saved != loaded:
            open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
