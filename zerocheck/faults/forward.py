"""Faults in the forward, and in buffers: other samples, random numbers, parameters, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
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
from .parts import Plantable, Zero3InParts, average, exchange_last_shards


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


@fault(
    bugs.BUFFERS_LOCAL, source="PT #178569; LlamaFactory #10820",
    features=("block-batch-norm", "several-steps"), world=3,
)  # fmt: skip
class BuffersNotBroadcast(Plantable, Ddp):
    """Rank 0's buffers are not broadcast."""

    def plant(self) -> None:
        self.built.model.broadcast_buffers = False  # type: ignore[assignment]


@fault(
    bugs.BUFFERS_SENT, source="seen often", features=("block-batch-norm", "microbatches"),
    without=("static-graph",), world=3, microbatches=3,
)  # fmt: skip
class BuffersSentOnce(Ddp):
    """Rank 0's buffers are broadcast only at the first forward of a step.

    Each microbatch is reduced, so they must be broadcast at every forward.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        each = msgspec.structs.replace(case.sharding, sync="each")
        super().__init__(model, msgspec.structs.replace(case, sharding=each), mesh)

    def train_step(self, step: Step) -> StepReport:
        self.built.model.broadcast_buffers = True  # type: ignore[assignment]
        return super().train_step(step)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with super().accumulating(last=last):
            yield
        self.built.model.broadcast_buffers = False  # type: ignore[assignment]


@fault(bugs.BUFFERS_AVERAGED, source="seen often", features=("block-batch-norm",), world=3)
class BuffersAveraged(Plantable, Zero1):
    """Buffers are averaged over ranks, though declared local."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                average(buffer, self.group)


@fault(bugs.BUFFERS_OF_RANK_0, source="seen often", features=("block-batch-norm",), world=3)
class BuffersOfRank0(Plantable, Zero2):
    """Rank 0's buffers overwrite the others', though declared local."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.optimizer.group)


@fault(bugs.BUFFERS_SENT_EACH, source="seen often", features=("block-batch-norm",))
class BuffersSent(Plantable, Zero2):
    """Rank 0's buffers are sent before each forward, though declared local."""

    def plant(self) -> None:
        self._hooks.append(self.model.register_forward_pre_hook(self._send))

    def _send(self, *_: object) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.optimizer.group)


@fault(bugs.BUFFERS_ROUNDED_TO_BF16, source="FS #427", features=("block-batch-norm",))
class BuffersRounded(Plantable, Zero3):
    """All buffers are cast to half precision."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            buffer.copy_(buffer.bfloat16())


@fault(
    bugs.BUFFERS_UPDATED_TWICE, source="PT #96136", features=("block-batch-norm",),
    without=("checkpoint",),
)  # fmt: skip
class StatisticsOfTheRecomputation(Ddp):
    """Blocks with batch norm are computed again in the backward: statistics move twice."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        for block in model.get_submodule("blocks").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        super().__init__(model, case, mesh)


@fault(bugs.BUFFERS_NOT_UPDATED, source="seen often", features=("block-batch-norm",))
class BuffersForgotten(Fsdp2):
    """Buffers are reset after every step, as if never registered."""

    def train_step(self, step: Step) -> StepReport:
        before = [buffer.clone() for buffer in self.built.model.buffers()]
        report = super().train_step(step)
        for buffer, kept in zip(self.built.model.buffers(), before, strict=True):
            buffer.copy_(kept)
        return report
