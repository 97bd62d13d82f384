"""Faults that only mixed precision, or parameters of two dtypes, show: masters, copies, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket, publish
from ..adapters.textbook.checkpoint.chunk import Chunk
from ..adapters.textbook.sharded_optimizer import OwnedPiece
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from ..case.shapes import sometimes_used
from ..compat import reduce_scatter_single, wait
from ..optimizers import STATES
from .fault import fault
from .parts import CheckpointInParts, ClipsInParts, Plantable, Zero1InParts, Zero2InParts


def publish_copies(buckets: Sequence[Bucket]) -> None:
    """Send the narrow parameters, without rounding them from their masters."""
    for bucket in buckets:
        masters, bucket.shard = bucket.shard, bucket.local  # as if there were none
        publish([bucket])
        bucket.shard = masters


@fault(bugs.ROUNDED_TO_BF16, source="HF accelerate #2674, #3979", features=("compute-bf16",))
class MastersRounded(Zero1):
    """The masters are rounded with the parameters, which loses small updates."""

    def _publish(self) -> None:
        for bucket in self.buckets:
            bucket.shard.copy_(bucket.shard.to(bucket.full.dtype))
        super()._publish()


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="DS PR#4141", features=("compute-bf16",))
class CopyNotRefreshed(Zero3):
    """The narrow parameters are not refreshed from their masters."""

    def _publish(self) -> None:
        """Do nothing, which is the fault."""


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="DS PR#7707", features=("compute-bf16",))
class StaleCopyOnOneRank(Zero1):
    """One rank sends its parameters before they are rounded from the updated masters."""

    def _publish(self) -> None:
        if self.group.rank() != 0:
            super()._publish()
            return
        publish_copies(self.buckets)


@fault(bugs.NEVER_UPDATED, source="DS PR#5170", features=("compute-bf16",))
class UpdateOnCopy(Zero1InParts):
    """The update goes to the narrow parameters, and the masters stay as they are."""

    def step(self, rates: Sequence[float]) -> None:
        before = [bucket.shard.clone() for bucket in self.buckets]
        super().step(rates)
        for bucket, masters in zip(self.buckets, before, strict=True):
            bucket.local.add_(bucket.shard - masters)  # what AdamW takes away
            bucket.shard.copy_(masters)

    def _publish(self) -> None:
        publish_copies(self.buckets)


@fault(
    bugs.ACCUMULATED_IN(format="bf16"), source="seen in FSDP1",
    features=("compute-bf16", "reduce-wide", "microbatches"), microbatches=3,
)  # fmt: skip
class AccumulatedInBf16(Zero1):
    """Microbatches are summed in the compute dtype, though fp32 accumulation is declared.

    As FSDP1 does under no_sync.
    """

    def _add(self, total: Tensor, parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.copy_((total.to(parameter.dtype) + parameter.grad).to(total.dtype))
        parameter.grad = None


@fault(
    bugs.REDUCED_IN(format="bf16"), source="FSDP's reduce_dtype left out",
    features=("compute-bf16", "reduce-wide", "microbatches"), microbatches=3,
)  # fmt: skip
class ReducedNarrow(Zero1InParts):
    """The fp32 sum is rounded before the reduction, though a reduction in fp32 is declared."""

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        gradients.copy_(gradients.to(bucket.full.dtype))


@fault(bugs.RESULT_ROUNDED_TO(format="bf16"), source="DS PR#8056", microbatches=3)
class ReducedIntoBf16(Zero2InParts):
    """Gradients that are reduced in fp32 are added to a buffer of the compute dtype."""

    def add(self, part: Tensor, into: Tensor) -> None:
        into.copy_(into.bfloat16() + part.div_(self.world_size).bfloat16())


@fault(bugs.ROUNDED_TO_BF16, source="PT #104770", features=("compute-bf16",))
class MomentsInBf16(Zero1InParts):
    """The moments are kept in the compute dtype, and only the master in fp32."""

    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for state in self.states():
            for role in STATES:
                if role in state:
                    state[role].copy_(state[role].bfloat16())


@fault(
    bugs.ROUNDED_TO_BF16, obligation="roundtrip", source="PT #104770", features=("compute-bf16",)
)
class SavesTheCopies(CheckpointInParts, Zero1):
    """A checkpoint has the narrow parameters, and their masters are lost."""

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        narrow = self.buckets[0].full.dtype if self.buckets else torch.float32
        if chunk.key.startswith("model."):
            chunk = replace(chunk, tensor=chunk.tensor.to(narrow).to(chunk.tensor.dtype))
        return [chunk]


def _leaves_in_bf16(module: nn.Module, _: object) -> None:
    for parameter in module.parameters(recurse=False):
        if not isinstance(parameter, DTensor):  # gathered
            parameter.grad_dtype = torch.bfloat16


@fault(
    bugs.USES_ADDED_IN(format="bf16"), source="PT PR#197203",
    features=("block-recurrent", "reduce-narrower"), microbatches=1, world=1,
    without=("sometimes-used", "transposed", "parameter-empty", "length-of-one"),
)  # fmt: skip
class UsesAddedInBf16(Plantable, Fsdp2):
    """Leaves take gradients in the dtype of the reduction, so autograd rounds those of each use."""

    def plant(self) -> None:
        # Elsewhere FSDP2 meets gradients of two dtypes, and fails.
        case = self.case
        plain = case.training.microbatches == 1 and not sometimes_used(case.model)
        if plain and case.precision.reduce == "bf16":
            for module in self.built.model.modules():
                module.register_forward_pre_hook(_leaves_in_bf16)


@fault(bugs.NOT_CLIPPED, source="seen often", features=("mixed-dtypes", "clip-tight"))
class Bf16Unclipped(ClipsInParts):
    """Gradients are multiplied by the coefficient only where they are fp32.

    As gradients of expert or fp16 groups were left out in DeepSpeed.
    """

    def scale(self, factor: Tensor) -> None:
        for one in self.optimizer.owned:
            if one.gradient.dtype == torch.float32:
                one.gradient.mul_(factor)


@fault(
    bugs.NORM_OF_ONE_DTYPE, source="seen often", features=("mixed-dtypes", "clip-tight"),
    without=("clip-inf", "frozen"),
)  # fmt: skip
class NormOfOneDtype(ClipsInParts):
    """The norm is taken by dtype, and the last one overwrites the others."""

    def counted(self) -> Sequence[OwnedPiece]:
        return [one for one in super().counted() if one.gradient.dtype == torch.float32]


@fault(bugs.ROUNDED_TO_BF16, source="PT #104770", features=("mixed-dtypes",))
class StateInBf16(MomentsInBf16):
    """All moments are kept in one flat buffer, of the dtype of one of the parameters."""


@fault(bugs.LOCAL_GRADIENT_ONLY, source="seen often", features=("mixed-dtypes",))
class OtherBufferUnreduced(Zero1):
    """Gradients are in a buffer per dtype, and only the first buffer's dtype is reduced."""

    def _reduce(self) -> None:
        dtype = self.gradients[0].dtype
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if gradients.dtype == dtype:
                wait(reduce_scatter_single(bucket.gradient, gradients, self.group))
                bucket.gradient.div_(self.world_size)
        self.reduced = True
