"""The rival: parity with one device, as PyTorch's own distributed tests check it.

`python -m pytest tests/benchmarks/rival_spawn.py` runs it alone. Every test method starts its rank
processes anew (torch.testing's MultiProcessTestCase), trains a sharded copy and a plain one in the
same ranks for five AdamW steps, and compares losses and final parameters, as PyTorch does in
test/distributed/_composable/fsdp/test_fully_shard_training.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

STEPS = 5
BATCH = 4


def mlp(first: int = 13, second: int = 5) -> nn.Sequential:
    """7-first-second-3, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, first), nn.GELU(), nn.Linear(first, second), nn.GELU(), nn.Linear(second, 3)
    )


def ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_beside(
    reference: nn.Sequential,
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    steps: int = STEPS,
) -> None:
    """Train a plain model on the samples of all ranks, next to a sharded one, and compare losses.

    step(inputs, target): one step of the sharded one, which returns its loss.
    """
    optimizer = torch.optim.AdamW(reference.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(BATCH, 7, generator=generator)
        target = torch.randn(BATCH, 3, generator=generator)
        optimizer.zero_grad()
        reference_loss = nn.functional.mse_loss(reference(inputs), target)
        reference_loss.backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        optimizer.step()
        torch.testing.assert_close(step(inputs, target), reference_loss)


def check_parity(
    shard: Callable[[nn.Sequential], nn.Module],
    *,
    steps: int = STEPS,
    widths: tuple[int, int] = (13, 5),
) -> None:
    """Train a sharded model and a plain one side by side; the process group is there already."""
    reference = mlp(*widths)
    sharded = shard(copy.deepcopy(reference))
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(sharded(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    train_beside(reference, step, steps=steps)
    for parameter, expected in zip(sharded.parameters(), reference.parameters(), strict=True):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, expected)


class _TestParity(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _start(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_ddp(self) -> None:
        self._start()
        check_parity(ddp)

    def test_fsdp2(self) -> None:
        self._start()
        check_parity(fsdp2)


class TestParity2(_TestParity):
    world_size = 2


class TestParity4(_TestParity):
    world_size = 4


del _TestParity  # a base, not a test

if __name__ == "__main__":
    run_tests()
