"""ZeRO-1: the optimizer state is partitioned (section 5.1 of the ZeRO paper, `P_os`).

    forward, backward   as on one device, with all parameters and all gradients
    reduce-scatter      each rank gets the mean gradient of its shard         P elements
    AdamW               each rank updates its shard, with its share of state
    all-gather          each rank gets the updated shards of all others       P elements

Plain data parallelism moves the same 2 P: its all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...compat import reduce_scatter_single
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
from .replicas import Replicas
from .sharded_adamw import ShardedAdamW


class Zero1(Resumable):
    """One rank of ZeRO-1; on a mesh of two axes, of one of its replicas.

    Gradients of all microbatches are summed locally and reduced once. A trainable parameter that
    the forward does not use has the gradient 0, so it still decays: its place in the flat buffer
    cannot be skipped. Frozen parameters are in no bucket and never change; those that are unfrozen
    later are in one, and the optimizer has no gradient of them until then.
    """

    semantics = Semantics(accumulate="local", unused="zero", buffers="local", weight="token")
    stage = 1
    options = ("bucket",)
    handles = UNCOMPILED

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refused(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the memory layout and collectives of a rank; exact for every case."""
        held = bucket_layout(model, case, rank, whole_gradients=True)
        return with_collectives(held, predicted_calls.zero1(model, case), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model = model
        self.call = lowered_call(model, case)
        self.case = case
        self.semantics = semantics_of(self.semantics, case)
        self.group, self.everyone = shard_group(mesh), every_rank(mesh)
        self.replicas = Replicas(mesh)
        self.world_size = self.group.size()
        self.buckets = buckets_of(model, case, self.group)
        cast_parameters(model, case)
        self._hooks: list[RemovableHandle] = []
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.gradients = [self._whole_gradients(bucket) for bucket in self.buckets]
        self.widened = [
            WideMaster(self._own(bucket, gradients), masters=reduced_precision(case))
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True)
        ]
        owned = [
            one
            for bucket, widened in zip(self.buckets, self.widened, strict=True)
            for one in bucket.pieces_owned(widened.tensor)
        ]
        for widened in self.widened:
            widened.release()
        self.optimizer = ShardedAdamW(case, owned, self.group, mesh.device_type)
        self.scaler = LossScaler(case, self.group, mesh.device_type)
        self.reduced = False

    def _whole_gradients(self, bucket: Bucket) -> torch.Tensor:
        """Return a flat buffer for a bucket's local gradients; the backward adds into its views.

        Autograd has a gradient in the dtype of its parameter: what is summed in another one is
        added when it is there.
        """
        dtype = gradient_dtype(self.case, bucket.flat)
        gradients = torch.zeros_like(bucket.flat, dtype=dtype)
        for parameter, view in zip(bucket.parameters, bucket.views(gradients), strict=True):
            if dtype == parameter.dtype:
                parameter.grad = view
            else:
                self.sums[parameter] = view
                if parameter.requires_grad:
                    self._listen(parameter)
        return gradients

    def _listen(self, parameter: nn.Parameter) -> None:
        """Add each complete gradient of the parameter to the sum in another dtype."""
        hook = parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)

    def _add(self, parameter: torch.Tensor) -> None:
        self.sums[parameter].add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    def _own(self, bucket: Bucket, gradients: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat gradient buffer."""
        return gradients[bucket.partition.shard(bucket.rank)]

    def train_step(self, step: Step) -> StepReport:
        """Backward of all microbatches, reduce-scatter, clip, update of the shard, all-gather."""
        self._unfreeze(step.unfreeze)
        for gradients in self.gradients:
            gradients.zero_()
        scale = self.scaler.scale
        for microbatch in step.microbatches:
            loss = microbatch.loss(self.call)
            if loss.requires_grad:
                loss = self.scaler.objective(loss, microbatch, len(step.microbatches))
                loss.backward()  # type: ignore[no-untyped-call]
        self._reduce()
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

    def _unfreeze(self, names: Collection[str]) -> None:
        for bucket in self.buckets:
            for number in bucket.unfreeze(names):
                if bucket.parameters[number] in self.sums:
                    self._listen(bucket.parameters[number])
        self.optimizer.unfreeze(names)

    def _reduce(self) -> None:
        """Replace this rank's shard of the gradients by their mean over ranks, then over replicas.

        In place: the shard is a view of the whole. The rest of the buffer is used up.
        """
        launched = []
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            mine = self._own(bucket, gradients)
            launched.append((reduce_scatter_single(mine, gradients, self.group), mine))
        for work, mine in launched:
            if work is not None:
                work.wait()
            mine.div_(self.world_size)
        self.replicas.average(mine for _, mine in launched)
        widen(self.buckets, self.widened)
        self.reduced = True

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
        """Drop gradients, moments and the flat buffers."""
        self.end_saving()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.sums.clear()
        self.optimizer.close()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self.buckets.clear()
        self.gradients.clear()
        self.widened.clear()
        del self.model, self.call
