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

from ...case.schema import Case
from ...compat import reduce_scatter_single
from ...contract import Semantics, Shard, Step, StepReport
from ...contract.implementation import EXTRAS
from ...contract.layout import Layout
from ..limits import fp32
from ..meshes import every_rank, shard_group
from ..traffic import textbook as traffic
from ..traffic.writing import with_told
from .bucket import Bucket, buckets_of
from .bytes import bucket_layout
from .checkpoint.resumable import Resumable
from .loss_scaling import LossScaler
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
    handles = EXTRAS

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """None, or the reason why this case cannot be run."""
        return fp32(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """What this rank holds and calls; exact for every case."""
        held = bucket_layout(model, case, rank, whole_gradients=True)
        return with_told(held, traffic.zero1(model, case), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model = model
        self.case = case
        self.group, self.everyone = shard_group(mesh), every_rank(mesh)
        self.replicas = Replicas(mesh)
        self.world_size = self.group.size()
        self.buckets = buckets_of(model, case, self.group)
        self.gradients = [self._whole_gradients(bucket) for bucket in self.buckets]
        owned = [
            one
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True)
            for one in bucket.pieces_owned(self._own(bucket, gradients))
        ]
        self.optimizer = ShardedAdamW(case, owned, self.group, mesh.device_type)
        self.scaler = LossScaler(case, self.group, mesh.device_type)
        self.reduced = False

    def _whole_gradients(self, bucket: Bucket) -> torch.Tensor:
        """A flat buffer for the local gradients of a bucket; the backward adds into its views."""
        gradients = torch.zeros_like(bucket.flat)
        for parameter, view in zip(bucket.parameters, bucket.views(gradients), strict=True):
            parameter.grad = view
        return gradients

    def _own(self, bucket: Bucket, gradients: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat gradient buffer."""
        return gradients[bucket.partition.shard(bucket.rank)]

    def train_step(self, step: Step) -> StepReport:
        """Backward of all microbatches, reduce-scatter, clip, update of the shard, all-gather."""
        self._unfreeze(step.unfreeze)
        for gradients in self.gradients:
            gradients.zero_()
        scale = self.scaler.scale
        for microbatch in step.microbatches:
            loss = microbatch.loss(self.model)
            if loss.requires_grad:
                loss = self.scaler.objective(loss, microbatch, len(step.microbatches))
                loss.backward()  # type: ignore[no-untyped-call]
        self._reduce()
        self.scaler.unscale(one.gradient for one in self.optimizer.owned)
        step.reached("reduced")
        norm = None
        training = self.case.training
        if training.clip is not None:
            norm = self.optimizer.clip(training.clip, float(training.norm))
            step.reached("clipped")
        if not self.scaler.overflow:
            self.optimizer.step(step.lr)
        self._publish()
        self.scaler.update()
        return StepReport(grad_norm=norm, skipped=self.scaler.overflow, loss_scale=scale)

    def _unfreeze(self, names: Collection[str]) -> None:
        for bucket in self.buckets:
            bucket.unfreeze(names)
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
        self.reduced = True

    def _publish(self) -> None:
        """Give every rank the updated parameters of all. All buckets are in flight at once."""
        for work in [bucket.publish() for bucket in self.buckets]:
            if work is not None:
                work.wait()

    def flat_buffers(self) -> list[Bucket]:
        """The buckets."""
        return self.buckets

    def shards(self) -> Iterator[Shard]:
        """Whole parameters and buffers; slices of gradient and moments; padding."""
        for name, parameter in self.model.named_parameters():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
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
        self.optimizer.restore(full)

    def close(self) -> None:
        """Drop gradients, moments and the flat buffers."""
        self.end_saving()
        self.optimizer.close()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self.buckets.clear()
        self.gradients.clear()
        del self.model
