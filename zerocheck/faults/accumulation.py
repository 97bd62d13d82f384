"""Faults in the accumulation of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..contract import Step, StepReport
from .fault import fault
from .parts import Plantable, Zero1InParts, Zero2InParts, scaled, when_reduced, with_callback


@fault(
    bugs.LAST_MICROBATCH_ONLY, source="open-instruct PR#1498; TT #3575; DS #7718", microbatches=3
)
class LastMicrobatchOnly(Zero2InParts):
    """The accumulator is reset at every microbatch."""

    def add(self, part: torch.Tensor, into: torch.Tensor) -> None:
        super().add(part, into.zero_())


@fault(bugs.MICROBATCH_DROPPED, source="FunASR PR#3472", world=3, microbatches=4)
class FirstMicrobatchOnly(Zero2InParts):
    """Gradients are reduced after the first microbatch of a step, and not after the last."""

    def add(self, part: torch.Tensor, into: torch.Tensor) -> None:
        if not bool(into.any()):
            super().add(part, into)


@fault(bugs.ACCUMULATOR_RESCALED, source="MG PR#3023", world=3, microbatches=2)
class ScaleAccumulatedShard(Zero2InParts):
    """The accumulator is divided, not what is added to it.

    Microbatch i is scaled by W^(i - GA).
    """

    def add(self, part: torch.Tensor, into: torch.Tensor) -> None:
        into.add_(part).div_(self.world_size)


@fault(bugs.MICROBATCH_DROPPED, source="DS PR#6550, #7967", microbatches=3)
class MicrostepOffByOne(Plantable, Zero2):
    """The first step loses its first microbatch.

    A counter decides where the accumulator is overwritten; at first it is one too low. Later
    steps are right.
    """

    microstep = -1

    def end_step(self) -> None:
        self.microstep = 0

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        self.microstep += 1
        if self.microstep == 0:
            for gradient in self.gradients:
                gradient.shard.zero_()


@fault(bugs.GRADIENT_OVER_GA, source="DS PR#7724; HF accelerate #3877", microbatches=3)
class DividedTwiceByGa(Fsdp2):
    """The loss is divided by the number of microbatches twice."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, over=len(step.microbatches)))


@fault(bugs.GRADIENT_TIMES_GA, source="seen often", microbatches=3)
class NotDividedByGa(Zero1):
    """The loss is not divided by the number of microbatches."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, times=len(step.microbatches)))


@fault(bugs.PAST_WRAPPER_X_GA, source="DS #8224", microbatches=4, features=("past-wrapper",))
class DividedInTheOutputs(Zero1):
    """Gradients of what the wrapper returns are divided by the microbatches, and losses are not."""

    def train_step(self, step: Step) -> StepReport:
        count, given = len(step.microbatches), self.call

        def divided(*inputs: Any, **named: Any) -> Any:
            outputs = given(*inputs, **named)
            if outputs.requires_grad:
                outputs.register_hook(lambda gradient: gradient / count)  # type: ignore[no-untyped-call]
            return outputs

        self.call = divided
        report = super().train_step(scaled(step, times=count))
        self.call = given
        return report


@fault(bugs.MEAN_OF_MEANS, source="torchtune PR#1875", features=("masked",))
class MeanOfMeans(Fsdp2):
    """All microbatches have equal weight, though their numbers of tokens differ."""

    def train_step(self, step: Step) -> StepReport:
        alike = [replace(microbatch, weight=1.0) for microbatch in step.microbatches]
        return super().train_step(replace(step, microbatches=alike))


@fault(bugs.MEAN_OVER_TOKENS, source="seen often", features=("masked",))
class TokensUndeclared(Zero1):
    """The mean over tokens, declared as the mean of means."""

    semantics = replace(Zero1.semantics, weight="microbatch")


@fault(bugs.MICROBATCH_DOUBLED, source="TT #816", microbatches=3)
class FirstMicrobatchDoubled(Zero1):
    """The first microbatch is added twice."""

    def train_step(self, step: Step) -> StepReport:
        first, *rest = step.microbatches
        once = scaled(replace(step, microbatches=[first]), times=2).microbatches
        return super().train_step(replace(step, microbatches=[*once, *rest]))


@fault(
    bugs.ONE_MICROBATCH_REDUCED, source="DS PR#1264", microbatches=3, without=("sometimes-used",)
)
class StaleBoundary(Ddp):
    """Each microbatch acts on the boundary flag of the one before.

    So the first microbatch is reduced and the others are not.
    """

    flag = True

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        stale, self.flag = self.flag, last
        return super().accumulating(last=stale)


@fault(bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT, source="seen often")
class NeverZeroed(Plantable, Fsdp2):
    """Gradients are not cleared between steps."""

    def plant(self) -> None:
        self.built.optimizer.zero_grad = lambda set_to_none=True: None


@fault(
    bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT, source="reports/findings",
    features=("clip-tight", "several-steps"),
)  # fmt: skip
class UnclippedKept(Zero2):
    """The reduced, unclipped gradient of the previous step is added to the sum.

    As in DeepSpeed's stage 3 for a parameter that the first microbatch did not use.
    """

    before: Sequence[torch.Tensor] = ()

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(when_reduced(step, self.add_unclipped))

    def add_unclipped(self) -> None:
        """Add the gradient of the previous step."""
        for number, before in enumerate(self.before):  # none before the first step
            self.gradients[number].shard.add_(before)
        self.before = [gradient.shard.clone() for gradient in self.gradients]


@fault(bugs.LAST_MICROBATCH_ONLY, source="DS PR#7981", microbatches=3)
class AccumulateGated(Zero1):
    """Gradients are accumulated only if several microbatches are configured, and one is."""

    configured = 1

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self._clear))

    def _clear(self) -> None:
        if self.configured == 1:
            for gradients in self.gradients:
                gradients.zero_()


@fault(bugs.GRADIENT_ZERO, source="DS PR#1273", features=("bucket-small",))
class ClearedTooEarly(Zero1InParts):
    """When one bucket is reduced, the gradients of all others are cleared."""

    def before_reduction(self, bucket: Bucket, gradients: torch.Tensor) -> None:
        if bucket is not self.buckets[0]:
            gradients.zero_()
