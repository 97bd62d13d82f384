"""Faults in updates, in the copies that ranks compute with, in buffers, shapes and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ... import causes as bugs
from ...adapters.ddp.adapter import Ddp
from ...adapters.fsdp2.adapter import Fsdp2
from ...adapters.textbook.unit import FlatParameter, Unit
from ...adapters.textbook.zero1 import Zero1
from ...adapters.textbook.zero2 import Zero2
from ...adapters.textbook.zero3 import Zero3
from ...case.schema import Case
from ...compat import all_gather_single, wait
from ...contract import Shard, Step, StepReport
from ...contract.groups import learning_rates
from ..fault import fault
from ..parts import Plantable, StartsAnew, Zero3InParts, when_reduced, with_callback


@fault(bugs.INITIAL_STATE, source="MG PR#5976", without=("sgd", "mid-training"))
class SyntheticStepCounted(StartsAnew, Zero1):
    """A step with rate 0 creates the optimizer's state, and the step count keeps it."""

    def plant(self) -> None:
        groups = self.optimizer.optimizer.param_groups
        options = [(group["lr"], group["weight_decay"]) for group in groups]
        for wide in self.wide:
            wide.widen()
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        self.optimizer.optimizer.step()
        for group, (rate, decay) in zip(groups, options, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        for wide in self.wide:
            wide.release()


@fault(
    bugs.LEARNING_RATE_OF_ANOTHER_STEP, source="HF transformers PR#24088",
    features=("schedule-cosine", "several-steps"), world=3,
)  # fmt: skip
class RatePerRank(Fsdp2):
    """The schedule advances once per rank, so W times in each step."""

    def train_step(self, step: Step) -> StepReport:
        rates = tuple(learning_rates(self.case, step.index * self.case.world_size))
        return super().train_step(replace(step, lr=rates))


@fault(
    bugs.LEARNING_RATE_OF_ANOTHER_STEP, source="Lightning #1476; HF accelerate #963",
    features=("schedule-warmup", "several-steps"), without=("mid-training",), microbatches=3,
)  # fmt: skip
class RatePerMicrobatch(Ddp):
    """The schedule advances with each microbatch, so the warm-up is over GA times too early."""

    def train_step(self, step: Step) -> StepReport:
        rates = tuple(learning_rates(self.case, step.index * len(step.microbatches)))
        return super().train_step(replace(step, lr=rates))


@fault(
    obligation="publish", source="TT PR#4598", features=("two-axes", "schedule-cosine"), world=4,
    without=("one-replica",), attributed=r"lr of another step",
)  # fmt: skip
class RateStaleInLastReplica(Zero3):
    """The last replica steps with a cached learning rate, that of the step before."""

    cached: tuple[float, ...] = ()

    def train_step(self, step: Step) -> StepReport:
        group = self.replicas.group
        rates, before = tuple(step.lr), self.cached
        self.cached = rates
        if before and group is not None and group.rank() == group.size() - 1:
            rates = before
        return super().train_step(replace(step, lr=rates))


@fault(
    bugs.NEVER_UPDATED, source="PT #149205",
    without=("optimizer-first", "frozen", "unused", "tensor-parallel"),
)  # fmt: skip
class OptimizerOverGatheredRoot(Fsdp2):
    """The optimizer is made while the root is gathered, and never updates the root's shards."""

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        root: Any = model
        root.unshard()
        optimizer = super().make_optimizer(model, case)
        root.reshard()
        return optimizer


@fault(bugs.STEP_SKIPPED, source="DS PR#7645", features=("loss-scale",), without=("overflow",))
class ReturnsBeforeTheStep(Zero1):
    """With loss scaling a step ends after the check for overflow, whether there was one or not."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        return replace(report, skipped=False)

    def _reduce(self) -> None:
        super()._reduce()
        if self.scaler.enabled:
            self.optimizer.step = lambda rates: None  # type: ignore[method-assign]


@fault(
    obligation="publish", source="MG c2c36f77cf", features=("bucket-small",),
    attributed=r"(are|is) 0",
)  # fmt: skip
class SharedBufferCleared(Zero1):
    """The first bucket to arrive clears the buffer that holds what was gathered for the others."""

    def _publish(self) -> None:
        super()._publish()
        for bucket in self.buckets[1:]:
            own = bucket.local.clone()
            bucket.full.zero_()
            bucket.local.copy_(own)


@fault(
    obligation="publish", source="MG b53d5e1ead", features=("bucket-small",),
    attributed=r"further back in the flat vector|other elements of the owner",
)  # fmt: skip
class BucketsGatheredAtOneOffset(Zero2):
    """All buckets are gathered at the start of one storage, where each overwrites the last."""

    def _publish(self) -> None:
        size = max((bucket.full.numel() for bucket in self.buckets), default=0)
        storage: dict[torch.dtype, torch.Tensor] = {}
        for bucket in self.buckets:
            bucket.refresh()
            dtype = bucket.full.dtype
            storage.setdefault(dtype, bucket.full.new_zeros(size))
            into = storage[dtype][: bucket.full.numel()]
            wait(all_gather_single(into, bucket.local.clone(), self.group))
        for bucket in self.buckets:
            own = bucket.local.clone()
            bucket.full.copy_(storage[bucket.full.dtype][: bucket.full.numel()])
            bucket.local.copy_(own)


@fault(
    bugs.MODULE_OF_AN_EARLIER_STEP, source="CA PR#5803; MG PR#6388", features=("wrap-block",),
    without=("no-blocks", "module-twice"),
)  # fmt: skip
class PrefetchedBeforeUpdate(Zero3):
    """The first unit of the next forward is gathered before the update of its shards."""

    early: Unit | None = None

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(when_reduced(step, self.gather_early))

    def gather_early(self) -> None:
        """Gather the first unit of the next forward."""
        self.early = self.order.calls[0] if self.order.calls else self.root
        self.early.gather()
        self.early.wait()

    def _begin_microbatch(self) -> None:
        early, self.early = self.early, None
        for unit in (*self.units, self.root):
            if unit is not early:
                unit.release()
        self.order.start()


@fault(
    bugs.COPIES_ROUNDED_TO_BF16, obligation="loss", source="DS PR#8073, PR#8128",
    features=("mixed-dtypes", "wrap-whole"),
)  # fmt: skip
class GatheredInOneDtype(Zero3InParts):
    """A unit of two dtypes is gathered in the narrow one, which rounds its fp32 parameters."""

    def wait(self, flat: FlatParameter) -> bool:
        (unit,) = (one for one in (*self.units, self.root) if flat in one.flats)
        arrives = super().wait(flat)
        if arrives and len({one.full.dtype for one in unit.flats}) > 1:
            flat.full.copy_(flat.full.bfloat16())
        return arrives


@fault(
    obligation="buffers", source="FS PR#1075", features=("block-batch-norm", "microbatches"),
    without=("sync-each", "static-graph"), world=3, microbatches=3,
)  # fmt: skip
class BuffersSentWithEachMicrobatch(Ddp):
    """Rank 0's buffers are broadcast at every forward, while gradients are still accumulated."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self._send))

    def _send(self) -> None:
        model: Any = self.built.model
        if model.require_forward_param_sync is False:
            model._sync_buffers()


@fault(bugs.ANOTHER_SHAPE, source="MG b74396f144", features=("block-conv",), without=("frozen",))
class ConvolutionsFlattened(Zero3):
    """Parameters of more than two dims are exposed with all dims after the first as one."""

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            if len(shard.shape) > 2:
                first, *others = shard.shape
                yield replace(shard, shape=(first, math.prod(others)))
            else:
                yield shard


@fault(obligation="persistent", source="CA PR#1955")
class GraphRetained(Zero2):
    """The backward keeps the graph, so activations live until the next loss replaces this one."""

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


@fault(obligation="persistent", source="DS PR#5328", features=("compute-bf16", "reduce-wide"))
class NarrowGradientsKept(Zero1):
    """Gradients in bf16 are cleared and not freed after they were added to their fp32 sums."""

    def _add(self, total: torch.Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad.zero_()


@fault(obligation="persistent", source="DS PR#8029", features=("frozen",), without=("unfreeze",))
class FrozenInBuffers(Plantable, Zero1):
    """Flat buffers of gradients and masters have room for frozen parameters, too."""

    def plant(self) -> None:
        self.room = [
            torch.zeros_like(parameter, dtype=torch.float32) for _, parameter in self.replicated()
        ]

    def close(self) -> None:
        super().close()
        self.room.clear()
