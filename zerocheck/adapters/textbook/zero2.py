"""ZeRO-2: gradients are partitioned too (section 5.2 of the ZeRO paper, `P_os+g`).

    backward        when the last gradient of a bucket is ready, it is reduce-scattered while the
                    backward goes on, and its memory is freed                 P elements
    optimizer       each rank updates its shard
    all-gather      each rank gets the updated shards of all others           P elements

A rank keeps 1/W of the gradients, and for a moment the buckets that are being filled or reduced.
"""

from __future__ import annotations

from functools import partial

import torch

from ...contract import Semantics
from .adapter import Sharder
from .bucket import Bucket, buckets_of, publish
from .precision import gradient_dtype
from .reduction import Reduction


class GradientBucket:
    """Gradients of a bucket: whole while they are collected, a shard otherwise."""

    shard: torch.Tensor
    """1-D, the sum over microbatches of the mean over ranks."""
    missing: int
    """Number of parameters whose gradient has not arrived in this backward."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.bucket = bucket
        self.shard = bucket.gradient = torch.zeros_like(bucket.local, dtype=dtype)
        self.missing = len(bucket.parameters)
        self._whole: torch.Tensor | None = None

    def collect(self, number: int) -> None:
        """Move the gradient of parameter `number` of the bucket into the flat buffer."""
        parameter = self.bucket.parameters[number]
        assert parameter.grad is not None
        start = self.bucket.partition.offsets[number]
        self._buffer()[start : start + parameter.numel()].view_as(parameter).copy_(parameter.grad)
        parameter.grad = None
        self.missing -= 1

    def take(self) -> torch.Tensor:
        """Give away the flat buffer. Missing gradients and padding are 0."""
        whole = self._buffer()
        self._whole = None
        self.missing = len(self.bucket.parameters)
        return whole

    def _buffer(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.zeros_like(self.bucket.full, dtype=self.shard.dtype)
        return self._whole


class Zero2(Sharder):
    """One rank of ZeRO-2.

    Every microbatch is reduced, and the results are summed in the shard: keeping whole gradients
    over microbatches would be ZeRO-1.
    """

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    stage = 2
    options = ("bucket",)

    def _partition(self) -> None:
        """Keep parameters whole, and a shard of the gradients."""
        self.buckets = buckets_of(self.model, self.case, self.group)
        self.gradients = [
            GradientBucket(bucket, gradient_dtype(self.case, bucket.full))
            for bucket in self.buckets
        ]
        self.reduction = Reduction(self.group)
        self._next = 0

    def flat_buffers(self) -> list[Bucket]:
        """Return the buckets."""
        return self.buckets

    def _listen(self, place: int, number: int) -> None:
        """Collect the gradient of parameter `number` of a bucket when it is complete."""
        gradient = self.gradients[place]
        ready = partial(self._ready, gradient, number)
        parameter = gradient.bucket.parameters[number]
        hook = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)

    def _ready(self, gradient: GradientBucket, number: int, _: torch.Tensor) -> None:
        """Record the complete gradient of one parameter; called in the backward."""
        gradient.collect(number)
        while self._next < len(self.gradients) and not self.gradients[self._next].missing:
            self._launch()

    def _launch(self) -> None:
        """Reduce the next bucket. The order is fixed, whichever bucket fills first."""
        gradient = self.gradients[self._next]
        self._next += 1
        self.reduction.launch(gradient.take(), gradient.bucket.mine, gradient.shard)

    def _end_microbatch(self) -> None:
        """Reduce, after a backward, the buckets that unused parameters kept from filling up."""
        while self._next < len(self.gradients):
            self._launch()
        self._next = 0
        self.reduction.finish()

    def _publish(self) -> None:
        """Gather the updated shards of all ranks."""
        publish(self.buckets)

    def close(self) -> None:
        """Drop the buckets, and the gradients in flight."""
        super().close()
        self.buckets.clear()
        self.gradients.clear()
        self.reduction.clear()
