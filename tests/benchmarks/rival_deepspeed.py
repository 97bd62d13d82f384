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
from benchmarks.rival_spawn import BATCH, mlp, train_beside
from torch import nn
from unit.common import DistributedTest  # type: ignore[import-not-found]


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
    reference = mlp()
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage))

    def step(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        return loss

    train_beside(reference, step)
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
