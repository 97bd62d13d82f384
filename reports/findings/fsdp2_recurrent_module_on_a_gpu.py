"""torch only: FSDP2 computes with the first parameters of a recurrent module for ever, on a GPU.

    torchrun --standalone --nproc-per-node 1 fsdp2_recurrent_module_on_a_gpu.py

A model with a recurrent module is trained twice from the same start with the same samples: as it
is, and sharded by fully_shard over one rank. The losses of the first step agree, all later ones do
not. Exits 1 while the fault is there, and 0 when it is gone; 2 without a GPU.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

STEPS = 4


class Model(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def losses(kind: type[nn.RNNBase]) -> list[tuple[float, float]]:
    """Of each step: of the plain model, and of the sharded one."""
    torch.manual_seed(0)
    plain = Model(kind).cuda()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(sharded.rnn, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    models = (plain, sharded)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    found = []
    for _ in range(STEPS):
        x = torch.randn(2, 3, 5, device="cuda")
        values = [model(x).square().sum() for model in models]
        for value, optimizer in zip(values, optimizers, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((values[0].item(), values[1].item()))
    return found


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("needs a GPU")
        sys.exit(2)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    wrong = False
    print(f"torch {torch.__version__}")
    for kind in (nn.GRU, nn.LSTM, nn.RNN):
        found = losses(kind)
        print(kind.__name__, *(f"{one:.4f} / {other:.4f}" for one, other in found))
        wrong |= any(abs(one - other) > 1e-3 * abs(one) for one, other in found)
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)
