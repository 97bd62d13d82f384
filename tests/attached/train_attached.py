"""A training script as people have them, with `attach` in it, and a fault that begins in mid-run.

torchrun --nproc-per-node 2 train_attached.py fsdp2 12 --every 5 --fault decay_twice --begins 7
"""

from __future__ import annotations

import argparse

import planted
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocheck


def model_of(sharding: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(17, 12), nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 17))
    model[1].bias.requires_grad_(False)
    if sharding == "fsdp2":
        fully_shard(model[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if sharding == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return DistributedDataParallel(model) if sharding == "ddp" else model


def train(sharding: str, steps: int, *, fault: str = "", begins: int = 7, **options: object) -> int:
    model = model_of(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    check = zerocheck.attach(model, optimizer, **options)
    data = torch.Generator().manual_seed(dist.get_rank())
    for number in range(1, steps + 1):
        with check.step(), planted.fault(fault if number >= begins else "", model, optimizer):
            for _ in range(2):
                tokens = torch.randint(17, (4, 6), generator=data)
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                (loss / 2).backward()
            planted.clip(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return check.taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sharding")
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--begins", type=int, default=7)
    parser.add_argument("--recorder")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(
        given.sharding,
        given.steps,
        fault=given.fault,
        begins=given.begins,
        every=given.every,
        recorder=given.recorder,
    )
    dist.destroy_process_group()
