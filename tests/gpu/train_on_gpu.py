"""A training script as people have them, on a GPU, with `attach` in it.

torchrun --nproc-per-node N train_on_gpu.py SHARDING MILLIONS [BEGINS]

MILLIONS: about so many million parameters; BEGINS: from this step on the decay is applied twice.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocheck

WIDTH = 2048


def made(layers: int) -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)]
    blocks = [nn.Sequential(*block) if n == 0 else nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
    ) for n in range(layers)]  # fmt: skip
    return nn.Sequential(nn.Embedding(512, WIDTH), *blocks, nn.Linear(WIDTH, 512))


def main(sharding: str, millions: int, begins: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    shared = ranks > torch.cuda.device_count()
    dist.init_process_group("cpu:gloo,cuda:gloo" if shared else "nccl")
    layers = max(1, round((millions * 1e6 - 1024 * WIDTH) / (8 * WIDTH**2)))
    model: nn.Module = made(layers).cuda()
    if sharding == "fsdp2":
        mesh = init_device_mesh("cuda", (ranks,))
        for block in model[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif sharding == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=gpu, use_orig_params=True)
    elif sharding == "ddp":
        model = DistributedDataParallel(model, device_ids=[gpu])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    check = zerocheck.attach(
        model, optimizer, reference=partial(made, layers), steps=(1, 2, 4), every=None, verbose=True
    )
    data = torch.Generator().manual_seed(dist.get_rank())
    for number in range(1, 5):
        with check.step():
            tokens = torch.randint(512, (2, 16), generator=data).cuda()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if begins and number >= begins:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1 - 1e-4)
            optimizer.step()
            optimizer.zero_grad()
    count = sum(parameter.numel() for parameter in made(layers).parameters())
    if dist.get_rank() == 0:
        held = torch.cuda.max_memory_allocated() / 2**30
        print(f"checked {count / 1e9:.2f}e9 parameters, {held:.1f} GiB at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
