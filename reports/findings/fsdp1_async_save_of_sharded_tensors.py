"""torch only: async_save fails on the sharded state dict that FSDP1 makes without a device mesh.

    python fsdp1_async_save_of_sharded_tensors.py

The same state dict is saved by `save`, and with a device mesh by `async_save` too.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))
warnings.simplefilter("ignore")

WORLD_SIZE = 2


def saved(path: str, *, in_background: bool, with_mesh: bool) -> str:
    """Save a model; returns what came of it."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,)) if with_mesh else None
    model = FSDP(nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
    try:
        if in_background:
            dcp.async_save(state, checkpoint_id=path).result()  # type: ignore[union-attr]
        else:
            dcp.save(state, checkpoint_id=path)
    except RuntimeError as error:
        if "torch function 'data_ptr'" not in str(error):
            raise
        return f"RuntimeError: {str(error).split(',')[0]} is not there for a ShardedTensor"
    return "saved"


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=20),
    )
    torch.set_num_threads(1)
    for with_mesh in (True, False):
        for in_background in (False, True):
            path = f"{folder}/{with_mesh}-{in_background}"
            said = saved(path, in_background=in_background, with_mesh=with_mesh)
            if said != "saved":
                open(f"{folder}/wrong", "w").close()
            if rank == 0:
                how = "async_save" if in_background else "save"
                print(f"{how}, {'with' if with_mesh else 'without'} a device mesh: {said}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
