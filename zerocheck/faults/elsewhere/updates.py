"""Faults in the update: its learning rate, its step count, what it reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ... import causes as bugs
from ...adapters.ddp.adapter import Ddp
from ...adapters.fsdp2.adapter import Fsdp2
from ...adapters.textbook.zero1 import Zero1
from ...adapters.textbook.zero3 import Zero3
from ...case.schema import Case
from ...contract import Step, StepReport
from ...contract.groups import learning_rates
from ..fault import fault
from ..parts import StartsAnew


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
