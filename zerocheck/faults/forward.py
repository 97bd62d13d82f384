"""Faults in the forward: other samples, other random numbers, other parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from .parts import Plantable, Zero3InParts, exchange_last_shards


@fault(bugs.SEED_FOR_ALL, obligation="loss", source="MG #6858", features=("dropout",))
class SeedForAll(Plantable, Zero2):
    """Every forward starts from one seed, on every rank."""

    def plant(self) -> None:
        self._hooks.append(self.model.register_forward_pre_hook(_reseed))


def _reseed(*_: Any) -> None:
    torch.manual_seed(0)


@fault(bugs.SEED_FOR_ALL, obligation="loss", source="MG #6858", features=("carried-rng",))
class SeededAlike(Plantable, Zero2):
    """Every rank seeds its generator alike when it begins."""

    def plant(self) -> None:
        torch.manual_seed(0)


@fault(
    bugs.EVALUATION_MODE, source="seen often", features=("dropout",), without=("sometimes-used",)
)
class EvaluationMode(Plantable, Ddp):
    """The model is left in evaluation mode."""

    def plant(self) -> None:
        self.built.model.eval()


@fault(
    bugs.DROPOUT_DRAWN_AGAIN, source="OLMo-core PR#828", features=("dropout",),
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


@fault(bugs.SAMPLES_OF_ANOTHER_MICROBATCH, source="TT #816", microbatches=3)
class FirstMicrobatchTwice(Zero3):
    """The first microbatch is run again in place of the second."""

    def train_step(self, step: Step) -> StepReport:
        first, *rest = step.microbatches
        return super().train_step(
            replace(step, microbatches=[first, *[first][: len(rest)], *rest[1:]])
        )


@fault(bugs.MICROBATCH_DROPPED, obligation="loss", source="DS PR#7981", microbatches=2)
class MicrobatchDropped(Zero1):
    """The last microbatch is not run."""

    def train_step(self, step: Step) -> StepReport:
        kept = step.microbatches[: max(1, len(step.microbatches) - 1)]
        return super().train_step(replace(step, microbatches=kept))


@fault(bugs.SAMPLES_OF_ANOTHER_RANK, source="TT #816")
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


@fault(bugs.SHARDS_EXCHANGED, obligation="loss", source="DS PR#318")
class ShardsMisordered(Zero3InParts):
    """The last two shards change places when they are gathered."""

    def wait(self, flat: FlatParameter) -> bool:
        if arrives := super().wait(flat):
            exchange_last_shards(flat, flat.full)
        return arrives


@fault(bugs.UNINITIALISED_MEMORY, obligation="loss", source="DS PR#5606")
class UnitNotGathered(Zero3InParts):
    """The root unit is gathered into another buffer than the one that is read."""

    def fill(self, flat: FlatParameter) -> dist.Work | None:
        if flat not in self.root.flats:
            return super().fill(flat)
        return all_gather_single(torch.empty_like(flat.full), flat.shard, flat.group)
