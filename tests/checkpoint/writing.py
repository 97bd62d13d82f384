"""Ranks that write one and the same training state, sharded in several ways: python writing.py DIR.

Started as a script of its own, which forks the ranks before torch has a thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from hand_made_checkpoints import adamw, network, state
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD_SIZES = (2, 3)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def work(rank: int, world_size: int, directory: Path) -> None:
    """Take over the state and write it: FSDP2 in two forms, its full state dict, and DDP."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / f'rendezvous-{world_size}'}",
        rank=rank,
        world_size=world_size,
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for kind in ("fsdp2", "ddp"):
        model: torch.nn.Module = network()
        if kind == "fsdp2":
            assert isinstance(model, torch.nn.Sequential)
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = adamw(model)
        given = state()  # anew, since loading puts shards into it
        set_state_dict(
            model,
            optimizer,
            model_state_dict=given["model"],
            optim_state_dict=given["optim"],
            options=FULL,
        )
        for form, options in (
            ("nested", StateDictOptions()),
            ("flat", StateDictOptions(flatten_optimizer_state_dict=True)),
            ("full", FULL),
        ):
            of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
            tree = {"model": of_model, "optim": of_optimizer}
            where = directory / f"{kind}-{world_size}-{form}"
            if form != "full":
                dcp.save(tree, checkpoint_id=where)
            elif rank == 0:
                torch.save(tree, where.with_suffix(".pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    for world_size in WORLD_SIZES:
        mp.start_processes(work, (world_size, Path(sys.argv[1])), world_size, start_method="fork")
