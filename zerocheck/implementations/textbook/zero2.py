"""ZeRO-2: gradients are partitioned too (section 5.2 of the ZeRO paper, `P_os+g`).

    backward        when the last gradient of a bucket is ready, it is reduce-scattered while the
                    backward goes on, and its memory is freed                 P elements
    AdamW           each rank updates its shard
    all-gather      each rank gets the updated shards of all others           P elements

A rank keeps 1/W of the gradients, and for a moment the buckets that are being filled or reduced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import Semantics, Shard, Step, StepReport
from ...contract.implementation import UNCOMPILED
from ...contract.layout import Layout
from ..collectives import textbook as predicted_calls
from ..collectives.writing import with_collectives
from ..meshes import every_rank, shard_group
from .bucket import Bucket, buckets_of
from .bytes import bucket_layout
from .checkpoint.resumable import Resumable
from .loss_scaling import LossScaler
from .master import (
    WideMaster,
    cast_parameters,
    gradient_dtype,
    lowered_call,
    refused,
    semantics_of,
    widen,
)
from .reduction import Reduction
from .replicas import Replicas
from .sharded_adamw import ShardedAdamW


class GradientBucket:
    """Gradients of a bucket: whole while they are collected, a shard otherwise.

    shard    1-D, the sum over microbatches of the mean over ranks
    missing  parameters whose gradient has not arrived in this backward
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None = None) -> None:
        """Build it. dtype: of the gradients; None: that of the bucket."""
        self.bucket = bucket
        self.shard = torch.zeros_like(bucket.own, dtype=dtype)
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
            self._whole = torch.zeros_like(self.bucket.flat, dtype=self.shard.dtype)
        return self._whole


class Zero2(Resumable):
    """One rank of ZeRO-2; on a mesh of two axes, of one of its replicas.

    Every microbatch is reduced, and the results are summed in the shard: keeping whole gradients
    over microbatches would be ZeRO-1. The sum is averaged over replicas once. A trainable parameter
    that the forward does not use has the gradient 0, so it still decays. Frozen parameters are in
    no bucket and never change; those that are unfrozen later are in one, and the optimizer has no
    gradient of them until then.
    """

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    stage = 2
    options = ("bucket",)
    handles = UNCOMPILED

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refused(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the memory layout and collectives of a rank; exact for every case."""
        held = bucket_layout(model, case, rank, whole_gradients=False)
        return with_collectives(held, predicted_calls.zero2(model, case), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model = model
        self.call = lowered_call(model, case)
        self.case = case
        self.semantics = semantics_of(self.semantics, case)
        self.group, self.everyone = shard_group(mesh), every_rank(mesh)
        self.replicas = Replicas(mesh)
        if mesh.ndim > 1:
            self.semantics = replace(self.semantics, accumulate="reduce_shards")
        self.buckets = buckets_of(model, case, self.group)
        cast_parameters(model, case)
        self.gradients = [
            GradientBucket(bucket, gradient_dtype(case, bucket.flat)) for bucket in self.buckets
        ]
        self.widened = [
            WideMaster(one.shard, masters=reduced_precision(case)) for one in self.gradients
        ]
        owned = [
            one
            for bucket, widened in zip(self.buckets, self.widened, strict=True)
            for one in bucket.pieces_owned(widened.tensor)
        ]
        for widened in self.widened:
            widened.release()
        self.optimizer = ShardedAdamW(case, owned, self.group, mesh.device_type)
        self.reduction = Reduction(self.group)
        self.scaler = LossScaler(case, self.group, mesh.device_type)
        self.reduced = False
        self._next = 0
        self._hooks: list[RemovableHandle] = []
        for gradient in self.gradients:
            for number, parameter in enumerate(gradient.bucket.parameters):
                if parameter.requires_grad:
                    self._listen(gradient, number)

    def _listen(self, gradient: GradientBucket, number: int) -> None:
        """Collect the gradient of parameter `number` of a bucket when it is complete."""
        ready = partial(self._ready, gradient, number)
        parameter = gradient.bucket.parameters[number]
        hook = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)

    def _unfreeze(self, names: Collection[str]) -> None:
        for gradient in self.gradients:
            for number in gradient.bucket.unfreeze(names):
                self._listen(gradient, number)
        self.optimizer.unfreeze(names)

    def train_step(self, step: Step) -> StepReport:
        """Backward with reductions inside, clip, update of the shard, all-gather."""
        self._unfreeze(step.unfreeze)
        for gradient in self.gradients:
            gradient.shard.zero_()
        scale = self.scaler.scale
        for microbatch in step.microbatches:
            loss = microbatch.loss(self.call)
            if loss.requires_grad:
                loss = self.scaler.objective(loss, microbatch, len(step.microbatches))
                loss.backward()  # type: ignore[no-untyped-call]
            self._flush()
        self.replicas.average(gradient.shard for gradient in self.gradients)
        widen(self.buckets, self.widened)
        self.reduced = True
        self.scaler.unscale(self.optimizer.given())
        step.reached("reduced")
        norm = None
        training = self.case.training
        if training.clip is not None:
            norm = self.optimizer.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if not self.scaler.overflow:
            self.optimizer.step(step.lr)
        for widened in self.widened:
            widened.release()
        self._publish()
        self.scaler.update()
        return StepReport(grad_norm=norm, skipped=self.scaler.overflow, loss_scale=scale)

    def _ready(self, gradient: GradientBucket, number: int, _: torch.Tensor) -> None:
        """Record the complete gradient of one parameter; called in the backward."""
        gradient.collect(number)
        while self._next < len(self.gradients) and not self.gradients[self._next].missing:
            self._launch()

    def _launch(self) -> None:
        """Reduce the next bucket. The order is fixed, whichever bucket fills first."""
        gradient = self.gradients[self._next]
        self._next += 1
        mine = gradient.bucket.partition.shard(gradient.bucket.rank)
        self.reduction.launch(gradient.take(), mine, gradient.shard)

    def _flush(self) -> None:
        """Reduce, after a backward, the buckets that unused parameters kept from filling up."""
        while self._next < len(self.gradients):
            self._launch()
        self._next = 0
        self.reduction.finish()

    def _publish(self) -> None:
        """Give every rank all updated parameters, with all buckets in flight at once."""
        for work in [bucket.publish() for bucket in self.buckets]:
            if work is not None:
                work.wait()

    def flat_buffers(self) -> list[Bucket]:
        """Return the buckets."""
        return self.buckets

    def shards(self) -> Iterator[Shard]:
        """Iterate over whole parameters and buffers, gradient and moment slices, and padding."""
        for name, parameter in self.model.named_parameters():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
        for bucket in self.buckets:
            yield from bucket.masters()
        if self.reduced:
            yield from self.optimizer.gradients()
        yield from self.optimizer.shards()
        for name, buffer in self.model.named_buffers():
            yield Shard(name, "buffer", buffer, tuple(buffer.shape))
        for bucket in self.buckets:
            yield from bucket.padding()

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Start in mid-training from whole tensors. The shards are views of the parameters."""
        for name, parameter in self.model.named_parameters():
            parameter.detach().copy_(full[name, "parameter"])
        for bucket in self.buckets:
            bucket.restore(full)
        self.optimizer.restore(full)

    def close(self) -> None:
        """Take the hooks off the parameters, drop gradients, moments and the flat buffers."""
        self.end_saving()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.reduction.clear()
        self.optimizer.close()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self.buckets.clear()
        self.gradients.clear()
        self.widened.clear()
        del self.model, self.call
