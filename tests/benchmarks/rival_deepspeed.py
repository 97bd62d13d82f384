"""The rival of DeepSpeed: parity with one device, on DeepSpeed's own `DistributedTest`.

Run by bench_deepspeed.py, with the `tests` of a checkout of DeepSpeed on the path. Each test starts
its ranks anew (a pool of processes from a fork server), or keeps them (`reuse_dist_env`). The
training is that of rival_spawn.py, by `deepspeed.initialize` with torch's AdamW in fp32.
"""

from __future__ import annotations

import copy

import deepspeed
import pytest
import torch
from torch import nn
from unit.common import DistributedTest  # type: ignore[import-not-found]

STEPS = 5
BATCH = 4


def mlp() -> nn.Sequential:
    """7-13-5-3, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5), nn.GELU(), nn.Linear(5, 3))


def config(stage: int) -> dict[str, object]:
    """DeepSpeed's configuration of a stage, with all else at its default."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }


def check_parity(stage: int) -> None:
    """Train an engine and a plain model side by side; the process group is there already."""
    dist = torch.distributed
    reference = mlp()
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))
    reference_optimizer = torch.optim.AdamW(reference.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 7, generator=generator)
        target = torch.randn(BATCH, 3, generator=generator)

        reference_optimizer.zero_grad()
        reference_loss = nn.functional.mse_loss(reference(inputs), target)
        reference_loss.backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        reference_optimizer.step()

        loss = nn.functional.mse_loss(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        torch.testing.assert_close(loss, reference_loss)
    parameters = [*engine.module.parameters()]
    gathered = [one for one in parameters if hasattr(one, "ds_id")]
    with deepspeed.zero.GatheredParameters(gathered):
        for parameter, expected in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), expected.detach())


class _Parity(DistributedTest):  # type: ignore[misc]
    @pytest.mark.parametrize("round", range(6))
    @pytest.mark.parametrize("stage", [1, 3])
    def test(self, stage: int, round: int) -> None:
        check_parity(stage)


class TestSpawned2(_Parity):
    world_size = 2


class TestSpawned4(_Parity):
    world_size = 4


class TestKept2(_Parity):
    world_size = 2
    reuse_dist_env = True


class TestKept4(_Parity):
    world_size = 4
    reuse_dist_env = True


del _Parity  # a base, not a test
