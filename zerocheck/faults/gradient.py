"""Faults in the reduction of gradients over ranks, and what silently leaves something out of it."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.sharded_optimizer import OwnedPiece
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from ..case.schema import Case
from ..compat import reduce_scatter_single, wait
from ..contract import Built, Step, StepReport, groups
from ..errors import Unsupported
from .fault import fault
from .parts import Plantable, Zero1InParts, average, exchange_last_shards, scaled, with_callback


@fault(bugs.GRADIENT_TIMES_W, source="PT #162338", world=3)
class AverageBecomesSum(Plantable, Zero2):
    """The average over ranks is a sum."""

    def plant(self) -> None:
        self.reduction.world_size = 1


@fault(bugs.GRADIENT_OVER_W, source="verl-SpeCo PR#29", world=3)
class DoubleAverage(Zero1):
    """The loss is divided by W, then gradients are averaged."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, over=self.world_size))


@fault(bugs.GRADIENT_TIMES_W, source="HF transformers #45994", world=3)
class LossTimesWorld(Fsdp2):
    """The loss is multiplied by W."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, times=self.case.world_size))


@fault(bugs.MEAN_IN_THE_LOSSES, source="TT disable_fsdp_gradient_division", world=3)
class MeanInTheLosses(Plantable, Fsdp2):
    """Each loss is divided by W and FSDP2 sums, while a mean in the reduction is declared.

    A right trainer that declares another one: torchtitan and others normalise so. It needs
    ranks that are no power of two, since a division by these is exact.
    """

    def plant(self) -> None:
        for module in self.built.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, over=self.case.world_size))


@fault(bugs.GRADIENT_OVER_W, source="TT disable_fsdp_gradient_division", world=3)
class DivisionLeftOn(Fsdp2):
    """Losses are divided by W, as declared, and FSDP2 averages as well.

    torchtitan's `disable_fsdp_gradient_division` is left out.
    """

    semantics = replace(Fsdp2.semantics, divide_ranks="loss")


@fault(bugs.LOCAL_GRADIENT_ONLY, source="PT #47562; MG #599, #1446", world=3)
class OneParameterUnreduced(Ddp):
    """The first parameter is left out of the reduction."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if len(trained) == 1:
            raise Unsupported("DDP refuses to ignore all parameters")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, trained[:1]
        )
        return super().build(model, case, mesh)


@fault(bugs.LOCAL_GRADIENT_ONLY, source="PT #60118", world=3)
class FirstStepUnsynced(Zero1):
    """The first step is not reduced."""

    def _reduce(self) -> None:
        if self.reduced:
            super()._reduce()
        self.reduced = True


@fault(bugs.LOCAL_GRADIENT_ONLY, source="PT #187732", world=3)
class SyncFirstStepOnly(Ddp):
    """Only the first step is reduced."""

    def train_step(self, step: Step) -> StepReport:
        model: Any = self.built.model
        with model.no_sync() if step.index else nullcontext():
            return super().train_step(step)


@fault(bugs.LOCAL_GRADIENT_ONLY, source="DS PR#3832", world=3, features=("bucket-small",))
class OversizedBucketSkipped(Zero1):
    """Buckets above the limit are not reduced."""

    def _reduce(self) -> None:
        local = [
            (bucket.gradient, bucket.gradient.clone())
            for bucket in self.buckets
            if bucket.partition.numel > self.case.sharding.bucket
        ]
        super()._reduce()
        for mine, kept in local:
            mine.copy_(kept)


@fault(bugs.GRADIENT_SCALED, source="DS PR#6546, #5618; TT #1551", world=3)
class SubgroupDivisor(Zero1InParts):
    """Vectors are divided by another group's size, W - 1."""

    def after_reduction(self, one: OwnedPiece) -> None:
        if len(one.piece.shape) == 1:
            one.gradient.mul_(self.world_size).div_(self.world_size - 1)


@fault(bugs.REDUCED_TWICE, source="NeMo PR#9335")
class ReducedTwice(Zero1):
    """Shards, which are reduced already, are averaged over ranks again."""

    def _reduce(self) -> None:
        super()._reduce()
        for bucket in self.buckets:
            average(bucket.gradient, self.group)


@fault(bugs.GRADIENT_TIMES_ROOT_W, source="seen often", world=3)
class RootOfWorld(Zero1InParts):
    """The sum over ranks is divided by sqrt(W)."""

    def after_reduction(self, one: OwnedPiece) -> None:
        one.gradient.mul_(self.world_size**0.5)


@fault(bugs.SHIFTED, source="DS PR#848, #851")
class ShardOffByOne(Zero1InParts):
    """Each rank reads its shard of the gradient one element too far."""

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        gradients.copy_(torch.cat([gradients[1:], gradients.new_zeros(1)]))


@fault(bugs.SHARD_OF_ANOTHER_RANK, source="DS PR#1841", world=3)
class ShardOfTheNext(Zero1InParts):
    """Each rank reduces the shard of the rank after it."""

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        gradients.copy_(gradients.roll(-bucket.partition.shard_size))


@fault(bugs.TAIL_LEFT_OUT, source="DS #1380", features=("uneven",))
class TailTakenForPadding(Zero1InParts):
    """The last n mod W elements of a parameter are taken for padding, and cleared."""

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        for view in bucket.views(gradients):
            size = view.numel()
            if size > self.world_size:
                view.view(-1)[size - size % self.world_size :] = 0.0


@fault(bugs.GRADIENT_OF_THE_PREVIOUS_STEP, source="seen often", features=("several-steps",))
class GradientOfThePreviousStep(Zero1):
    """The optimizer gets the gradient of the step before.

    The gradient buffers are read before the reduction has written them.
    """

    def _reduce(self) -> None:
        super()._reduce()
        kept = [one.gradient.clone() for one in self.optimizer.owned]
        for one, before in zip(self.optimizer.owned, getattr(self, "before", kept), strict=True):
            one.gradient.copy_(before)
        self.before = kept


@fault(bugs.GRADIENT_DOUBLED, source="DS PR#7534", world=3, features=("tied",))
class TiedReducedTwice(Zero1):
    """A tied parameter is reduced once per alias."""

    def _reduce(self) -> None:
        gradient = self.model.get_parameter("stem.weight").grad
        if self.case.model.tied and gradient is not None:
            gradient.mul_(2)
        super()._reduce()


@fault(bugs.SHARDS_EXCHANGED, source="DS PR#318")
class PartitionsMisordered(Zero1InParts):
    """The last two shards of each bucket change places before the reduction."""

    def before_reduction(self, bucket: Bucket, gradients: Tensor) -> None:
        exchange_last_shards(bucket, gradients)


@fault(bugs.OFFSET_NOT_MOVED, source="DS PR#545", features=("unused",))
class NoneGradientShifts(Plantable, Zero2):
    """A parameter without a gradient does not move the offset."""

    def plant(self) -> None:
        self.arrived: set[tuple[GradientBucket, int]] = set()

    def _ready(self, gradient: GradientBucket, number: int, _: Tensor) -> None:
        self.arrived.add((gradient, number))
        super()._ready(gradient, number, _)

    def _launch(self) -> None:
        gradient = self.gradients[self._next]
        partition = gradient.bucket.partition
        flat = gradient._buffer()
        shifted = torch.zeros_like(flat)
        shift = 0
        for number, start in enumerate(partition.offsets):
            stop = (*partition.offsets, partition.numel)[number + 1]
            if (gradient, number) in self.arrived:
                shifted[start - shift : stop - shift] = flat[start:stop]
            else:
                shift += stop - start
        flat.copy_(shifted)
        self.arrived -= {(gradient, number) for number in range(len(partition.offsets))}
        super()._launch()


@fault(bugs.REDUCTION_NOT_WAITED_FOR, source="OpenNMT-py #2295", features=("delays",))
class NotWaitedFor(Zero1):
    """The reduction is launched, and the gradient is divided before it is over.

    Now and then it is over by chance.
    """

    def train_step(self, step: Step) -> StepReport:
        self.in_flight: deque[dist.Work | None] = deque()
        try:
            return super().train_step(step)
        finally:
            while self.in_flight:
                wait(self.in_flight.popleft())

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            work = reduce_scatter_single(bucket.gradient, gradients, self.group)
            self.in_flight.append(work)
            bucket.gradient.div_(self.world_size)
            self.divided()
        self.reduced = True

    def divided(self) -> None:
        """Go on with the next bucket, without waiting for this one."""


@fault(bugs.REDUCTION_NOT_WAITED_FOR, source="DS PR#1264", world=3, features=("bucket-small",))
class WaitsForTheOneBefore(NotWaitedFor):
    """Each bucket waits for the handle of the bucket before.

    So its own result is divided before it is there, and that of the last bucket is never waited
    for.
    """

    def divided(self) -> None:
        while len(self.in_flight) > 1:
            wait(self.in_flight.popleft())


@fault(bugs.GRADIENT_SCALED, source="DS PR#5555", world=3)
class ExtraParallelDivisor(Zero1InParts):
    """Gradients are divided by the size of an axis that does not split the batch.

    The axis has 8 ranks, of sequence parallelism.
    """

    def after_reduction(self, one: OwnedPiece) -> None:
        one.gradient.div_(8)


@fault(
    obligation="gradient", source="DS PR#1841",
    attributed=r"holds .* of the rank's own gradient|stand .* of the rank's own gradient",
)  # fmt: skip
class OwnershipUntested(Zero1):
    """Elements owned by other ranks are copied too, over the own ones."""

    def _reduce(self) -> None:
        local = [gradients.clone() for gradients in self.gradients]
        super()._reduce()
        for bucket, whole in zip(self.buckets, local, strict=True):
            for rank in range(self.world_size):
                if rank != self.group.rank():
                    bucket.gradient.copy_(whole[bucket.partition.shard(rank)])


@fault(
    bugs.LOCAL_GRADIENT_ONLY, source="PT #104336", world=3,
    without=("tied", "frozen", "sometimes-used"),
)  # fmt: skip
class HooksLostOnMove(Ddp):
    """A layer is moved after DDP was made, which gives it new parameters.

    DDP reduces the old ones.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        # What it lacks then counts as unused.
        sharding = structs.replace(case.sharding, find_unused=True, static_graph=False)
        built = super().build(model, structs.replace(case, sharding=sharding), mesh)
        layer: Any = model.get_submodule("stem")
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(
                name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            )
        return replace(built, optimizer=torch.optim.AdamW(groups(built.model, case)))


@fault(
    bugs.NEVER_UPDATED, source="MG 9a8420c90a", features=("bucket-small",),
    without=("frozen", "unused"),
)  # fmt: skip
class BucketsRecreated(Plantable, Zero1):
    """Only the last bucket is updated.

    The table of parameters to update is rebuilt for each bucket.
    """

    def plant(self) -> None:
        names = {name for name, _ in self.buckets[-1].partition.shapes}
        kept = {one.parameter for one in self.optimizer.owned if one.piece.name in names}
        for group in self.optimizer.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one in kept]


# A GRU runs another kernel where its parameters do not learn: its loss differs first.
@fault(
    obligation="gradient", source="FS #780", features=("module-twice",),
    without=("frozen", "checkpoint", "block-recurrent"), attributed=r"of its use 2 of 2 .* it is 0",
)  # fmt: skip
class ReusedModuleOverwrites(Plantable, Zero1):
    """The gradient of one call of a reused module replaces that of the other."""

    def plant(self) -> None:
        self.called: set[nn.Module] = set()
        for block in self.model.get_submodule("blocks").children():
            block.register_forward_pre_hook(self._before)
            block.register_forward_hook(self._after)
        self.silent: list[nn.Parameter] = []

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self.called.clear))

    def _before(self, block: nn.Module, _: Any) -> None:
        if block in self.called:
            self.silent = [one for one in block.parameters() if one.requires_grad]
            for parameter in self.silent:
                parameter.requires_grad_(False)
        self.called.add(block)

    def _after(self, *_: Any) -> None:
        for parameter in self.silent:
            parameter.requires_grad_(True)
        self.silent = []


@fault(
    obligation="gradient", source="PT #124193", features=("sometimes-used", "microbatches"),
    microbatches=2, attributed=r"own gradient alone",
)  # fmt: skip
class LastTouchedOnly(Plantable, Zero1):
    """Only parameters used by the last microbatch are reduced.

    Gradients of earlier ones stay local.
    """

    def plant(self) -> None:
        self.before: dict[nn.Parameter, torch.Tensor] = {}

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self._note))

    def _note(self) -> None:
        self.before = {
            one: one.grad.clone() for one in self.model.parameters() if one.grad is not None
        }

    def _reduce(self) -> None:
        local = [gradients.clone() for gradients in self.gradients]
        super()._reduce()
        for bucket, whole, mean in zip(self.buckets, local, self.gradients, strict=True):
            for parameter, mine, into in zip(
                bucket.parameters, bucket.views(whole), bucket.views(mean), strict=True
            ):
                if torch.equal(mine, self.before.get(parameter, mine)):
                    into.copy_(mine)


@fault(
    obligation="gradient", source="MG #844", features=("tied",), without=("frozen",),
    attributed=r"of its use 1 of 2|own gradient alone",
)  # fmt: skip
class TiedBeforeSync(Plantable, Zero1):
    """A tied weight is reduced before its two gradients are added.

    The second one stays local.
    """

    def plant(self) -> None:
        self.weight = self.model.get_parameter("stem.weight")
        self.alias = nn.Parameter(self.weight.detach(), self.weight.requires_grad)

    def train_step(self, step: Step) -> StepReport:
        self.alias.grad = None
        stem = self.model.get_submodule("stem")
        before = stem.register_forward_pre_hook(lambda *_: self._use(self.alias))
        after = stem.register_forward_hook(lambda *_: self._use(self.weight))
        try:
            return super().train_step(step)
        finally:
            before.remove()
            after.remove()

    def _use(self, weight: nn.Parameter) -> None:
        self.model.get_submodule("stem")._parameters["weight"] = weight

    def _reduce(self) -> None:
        super()._reduce()
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for parameter, mean in zip(bucket.parameters, bucket.views(gradients), strict=True):
                if parameter is self.weight and self.alias.grad is not None:
                    mean.add_(self.alias.grad, alpha=1 / self.world_size)
