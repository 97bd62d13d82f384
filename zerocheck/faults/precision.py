"""Faults that only mixed precision shows: masters, their copies, and declared dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.checkpoint.chunk import Chunk
from ..adapters.textbook.sharded_optimizer import MOMENTS, ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from .parts import WithOptimizer


class MastersRounded(Zero1):
    """The masters are rounded with the parameters, which loses small updates.

    HF accelerate #2674, #3979. Flagged: update, rounded to bf16.
    """

    def _publish(self) -> None:
        for bucket in self.buckets:
            bucket.shard.copy_(bucket.shard.to(bucket.full.dtype))
        super()._publish()


class CopyNotRefreshed(Zero3):
    """The narrow parameters are not refreshed from their masters (DS PR#4141).

    Flagged: publish, copies of the previous step.
    """

    def _publish(self) -> None:
        """Do nothing, which is the fault."""


class StaleCopyOnOneRank(Zero1):
    """One rank sends its parameters before they are rounded from the updated masters.

    Flagged: publish, copies of the previous step.
    """

    def _publish(self) -> None:
        if self.group.rank() != 0:
            super()._publish()
            return
        for bucket in self.buckets:
            masters = bucket.shard
            bucket.shard = bucket.local  # as if there were none
            work = bucket.publish()
            bucket.shard = masters
            if work is not None:
                work.wait()


class _OnCopies(ShardedOptimizer):
    buckets: Sequence[Bucket] = ()

    def step(self, rates: Sequence[float]) -> None:
        before = [bucket.shard.clone() for bucket in self.buckets]
        super().step(rates)
        for bucket, masters in zip(self.buckets, before, strict=True):
            bucket.local.add_(bucket.shard - masters)  # what AdamW takes away
            bucket.shard.copy_(masters)


class UpdateOnCopy(WithOptimizer):
    """The update goes to the narrow parameters, and the masters stay as they are (DS PR#5170).

    Flagged: update, never updated.
    """

    kind = _OnCopies

    def _publish(self) -> None:
        """Send the updated copies, without rounding them from their masters."""
        assert isinstance(self.optimizer, _OnCopies)
        for bucket in self.buckets:
            masters, bucket.shard = bucket.shard, bucket.local
            work = bucket.publish()
            bucket.shard = masters
            if work is not None:
                work.wait()

    def _reduce(self) -> None:
        assert isinstance(self.optimizer, _OnCopies)
        self.optimizer.buckets = self.buckets
        super()._reduce()


class AccumulatedInBf16(Zero1):
    """Microbatches are summed in the compute dtype, though fp32 accumulation is declared.

    As FSDP1 does under no_sync. Flagged: gradient, accumulated in bf16.
    """

    def _add(self, total: torch.Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        total.copy_((total.to(parameter.dtype) + parameter.grad).to(total.dtype))
        parameter.grad = None


class ReducedNarrow(Zero1):
    """The fp32 sum is rounded before the reduction, though a reduction in fp32 is declared.

    Flagged: gradient, reduced in bf16.
    """

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            gradients.copy_(gradients.to(bucket.full.dtype))
        super()._reduce()


class _InBf16(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for state in self.optimizer.state.values():
            for role in MOMENTS:
                if role in state:
                    state[role].copy_(state[role].bfloat16())


class MomentsInBf16(WithOptimizer):
    """The moments are kept in the compute dtype, and only the master in fp32.

    Flagged: update, rounded to bf16.
    """

    kind = _InBf16


class SavesTheCopies(Zero1):
    """A checkpoint has the narrow parameters, and their masters are lost (PT #104770).

    Flagged: roundtrip, rounded to bf16.
    """

    def written(self) -> Iterator[Chunk]:
        narrow = self.buckets[0].full.dtype if self.buckets else torch.float32
        for chunk in super().written():
            if chunk.key.startswith("model."):
                chunk = replace(chunk, tensor=chunk.tensor.to(narrow).to(chunk.tensor.dtype))
            yield chunk
