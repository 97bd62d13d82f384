"""Faults in the forward: other samples, other random numbers, other parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..compat import all_gather_single
from ..contract import Built, Step, StepReport
from ..models.batches import batch
from .fault import fault


@fault("zero2", "loss", bugs.SEED_FOR_ALL, source="MG #6858", features=("dropout",))
class SeedForAll(Zero2):
    """Every forward starts from one seed, on every rank."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.handle = model.register_forward_pre_hook(_reseed)

    def close(self) -> None:
        self.handle.remove()
        super().close()


def _reseed(*_: Any) -> None:
    torch.manual_seed(0)


@fault("zero2", "loss", bugs.SEED_FOR_ALL, source="MG #6858", features=("carried-rng",))
class SeededAlike(Zero2):
    """Every rank seeds its generator alike when it begins."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        torch.manual_seed(0)


@fault(
    "ddp", "loss", bugs.EVALUATION_MODE, source="seen often", features=("dropout",),
    without=("sometimes-used",),
)  # fmt: skip
class EvaluationMode(Ddp):
    """The model is left in evaluation mode."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        built.model.eval()
        return built


@fault(
    "fsdp2", "gradient", bugs.DROPOUT_DRAWN_AGAIN, source="OLMo-core PR#828", features=("dropout",),
    without=("checkpoint", "block-batch-norm"),
)  # fmt: skip
class CheckpointWithoutRandomState(Fsdp2):
    """Activation checkpointing of each block does not keep the random state."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        blocks: Any = model.blocks
        for block in blocks:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        return super().build(model, case, mesh)


@fault("zero3", "loss", bugs.SAMPLES_OF_ANOTHER_MICROBATCH, source="TT #816", microbatches=3)
class FirstMicrobatchTwice(Zero3):
    """The first microbatch is run again in place of the second."""

    def train_step(self, step: Step) -> StepReport:
        first, *rest = step.microbatches
        return super().train_step(
            replace(step, microbatches=[first, *[first][: len(rest)], *rest[1:]])
        )


@fault("zero1", "loss", bugs.MICROBATCH_DROPPED, source="DS PR#7981", microbatches=2)
class MicrobatchDropped(Zero1):
    """The last microbatch is not run."""

    def train_step(self, step: Step) -> StepReport:
        kept = step.microbatches[: max(1, len(step.microbatches) - 1)]
        return super().train_step(replace(step, microbatches=kept))


@fault("zero1", "loss", bugs.SAMPLES_OF_ANOTHER_RANK, source="TT #816")
class SamplesOfRank0(Zero1):
    """Every rank reads the samples of rank 0."""

    def train_step(self, step: Step) -> StepReport:
        same = []
        for number, one in enumerate(step.microbatches):
            drawn = batch(self.case, step=step.index, rank=0, microbatch=number)
            drawn = drawn.on(one.target.device)
            seed = None if one.seed is None else drawn.seed
            same.append(replace(one, inputs=drawn.inputs, target=drawn.target, seed=seed))
        return super().train_step(replace(step, microbatches=same))


class _Misordered(FlatParameter):
    def wait(self) -> None:
        arrived = self._work is not None
        super().wait()
        if arrived:
            size = self.group.size()
            one = self.full[self.partition.shard(size - 1)]
            other = self.full[self.partition.shard(max(0, size - 2))]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


@fault("zero3", "loss", bugs.SHARDS_EXCHANGED, source="DS PR#318")
class ShardsMisordered(Zero3):
    """The last two shards change places when they are gathered."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.flats:
            flat.__class__ = _Misordered


class _Elsewhere(FlatParameter):
    def gather(self) -> None:
        if not self.gathered:
            self.storage.resize_(self._bytes)
            other = torch.empty_like(self.full)
            self._work = all_gather_single(other, self.shard, self.group)
            self.gathered = True


@fault("zero3", "loss", bugs.UNINITIALISED_MEMORY, source="DS PR#5606")
class UnitNotGathered(Zero3):
    """The root unit is gathered into another buffer than the one that is read."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.root.flats:
            flat.__class__ = _Elsewhere
