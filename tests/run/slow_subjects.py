"""Sharders that are right, and run badly."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.case.schema import Case
from zerocheck.contract import Built, Implementation, Shard, Step, StepReport

SLEEPS = 0.3
"""Seconds: long beside sending one number."""


class OneBucket(Ddp):
    """One bucket for all, whatever is asked for."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        one = replace(case, sharding=replace(case.sharding, bucket=1 << 20))
        return super().build(model, one, mesh)


class OneUnit(Fsdp2):
    """One unit for all, whatever is asked for."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        one = replace(case, sharding=replace(case.sharding, wrap="whole"))
        return super().build(model, one, mesh)


class SlowRank(Implementation):
    """Rank 1 is slow; nothing else is done."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        pass

    def train_step(self, step: Step) -> StepReport:
        comes = torch.zeros(1)
        if dist.get_rank():
            dist.recv(comes, 0)
            time.sleep(SLEEPS)
        else:
            dist.send(comes, 1)
        dist.all_reduce(comes)
        return StepReport()

    def shards(self) -> list[Shard]:
        return []


class BreaksLater(Zero2):
    """Breaks in a step that no case has."""

    def train_step(self, step: Step) -> StepReport:
        if step.index > 2:
            raise RuntimeError("it was never to come so far")
        return super().train_step(step)
