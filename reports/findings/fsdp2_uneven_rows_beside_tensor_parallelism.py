"""torch only: FSDP2 beside tensor parallelism reads and saves other rows than it holds.

    python fsdp2_uneven_rows_beside_tensor_parallelism.py

A weight of 7 rows on a mesh of 3 x 2 (shard, tp): each rank of tp has 4 or 3 rows, of which each
rank of the shard axis has a chunk. The placement that FSDP2 gives it, _StridedShard, says that
rank 4 has the last row; rank 5 has it. So neither full_tensor() nor a checkpoint has it right.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

SHARDS, TENSOR, ROWS = 3, 2, 7
WORLD_SIZE = SHARDS * TENSOR


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=20),
    )
    torch.set_num_threads(1)
    wrong = check(rank, folder)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def check(rank: int, folder: str) -> bool:
    mesh = init_device_mesh("cpu", (SHARDS, TENSOR), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(1, ROWS, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(ROWS).view(-1, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    weight = model[0].weight
    held = weight.to_local().detach().flatten().tolist()
    every = [[] for _ in range(WORLD_SIZE)]
    dist.all_gather_object(every, held)
    expected = torch.arange(ROWS).tolist()
    results = {}
    try:
        results["full_tensor()"] = weight.full_tensor().detach().flatten().tolist()
    except Exception as error:
        results["full_tensor()"] = f"{type(error).__name__}: {error}"[:100]
    whole = {"0.weight": torch.full((ROWS, 1), -1.0)}
    done = "saved"
    try:
        dcp.save({"0.weight": weight}, checkpoint_id=f"{folder}/checkpoint")
        done = "loaded"
        dcp.load(whole, checkpoint_id=f"{folder}/checkpoint")
        results["the checkpoint"] = whole["0.weight"].flatten().tolist()
    except BaseException as error:  # CheckpointException is no Exception
        why = f"{error}".splitlines()[-1][:100]
        results["the checkpoint"] = f"{type(error).__name__} when it is {done}: {why}"
    if rank == 0:
        print(f"rows that the ranks hold: {every}")
        for what, got in results.items():
            print(f"{what}: expected {expected}; got {got}")
    return any(got != expected for got in results.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
