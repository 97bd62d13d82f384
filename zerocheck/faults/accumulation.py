"""Faults in the accumulation of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..case.schema import Case
from ..contract import Built, Step, StepReport
from ..contract.implementation import Moment
from .parts import scaled, with_callback


class _Overwriting(Reduction):
    def _land(self) -> None:
        self._in_flight[0][2].zero_()
        super()._land()


class LastMicrobatchOnly(Zero2):
    """The accumulator is reset at every microbatch (open-instruct PR#1498, TT #3575).

    Flagged: last microbatch only.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.reduction = _Overwriting(self.reduction.group)


class _Rescaling(Reduction):
    def _land(self) -> None:
        work, part, into = self._in_flight.popleft()
        if work is not None:
            work.wait()
        into.add_(part).div_(self.world_size)


class ScaleAccumulatedShard(Zero2):
    """The accumulator is divided, not what is added to it (MG PR#3023).

    Microbatch i is scaled by W^(i - GA). Flagged: accumulator rescaled.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.reduction = _Rescaling(self.reduction.group)


class MicrostepOffByOne(Zero2):
    """A counter decides where the accumulator is overwritten; at first it is one too low.

    The first step loses its first microbatch, later ones are right (DS PR#6550, #7967).
    Flagged: microbatch dropped, at step 0.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.microstep = -1

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        self.microstep = 0
        return report

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        self.microstep += 1
        if self.microstep == 0:
            for gradient in self.gradients:
                gradient.shard.zero_()


class DividedTwiceByGa(Fsdp2):
    """The loss is divided by the number of microbatches in two places (DS PR#7724).

    Flagged: gradient / GA.
    """

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, over=len(step.microbatches)))


class NotDividedByGa(Zero1):
    """The loss is not divided by the number of microbatches. Flagged: gradient x GA."""

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(scaled(step, times=len(step.microbatches)))


class MeanOfMeans(Fsdp2):
    """All microbatches have equal weight, though their numbers of tokens differ.

    torchtune PR#1875. Flagged: mean of means.
    """

    def train_step(self, step: Step) -> StepReport:
        alike = [replace(microbatch, weight=1.0) for microbatch in step.microbatches]
        return super().train_step(replace(step, microbatches=alike))


class TokensUndeclared(Zero1):
    """The mean over tokens, declared as the mean of means. Flagged: mean over tokens."""

    semantics = replace(Zero1.semantics, weight="microbatch")


class StaleBoundary(Ddp):
    """Each microbatch acts on the boundary flag of the one before (DS PR#1264).

    So the first microbatch is reduced and the others are not. Flagged: one microbatch reduced.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.flag = True

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        stale, self.flag = self.flag, last
        return super().accumulating(last=stale)


class NeverZeroed(Fsdp2):
    """Gradients are not cleared between steps. Flagged: gradient of the previous step kept."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        built.optimizer.zero_grad = lambda set_to_none=True: None
        return built


class UnclippedKept(Zero2):
    """The reduced, unclipped gradient of the previous step is added to the sum.

    As in DeepSpeed's stage 3 for a parameter that the first microbatch did not use. Flagged:
    gradient of the previous step kept.
    """

    kept: Sequence[torch.Tensor] = ()

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(replace(step, reached=partial(self._reached, step.reached)))

    def _reached(self, notify: Callable[[Moment], None], moment: Moment) -> None:
        if moment == "reduced":
            for number, kept in enumerate(self.kept):  # none before the first step
                self.gradients[number].shard.add_(kept)
            self.kept = [gradient.shard.clone() for gradient in self.gradients]
        notify(moment)


class AccumulateGated(Zero1):
    """Gradients are accumulated only if several microbatches are configured, and one is.

    DS PR#7981. Flagged: last microbatch only.
    """

    configured = 1

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self._clear))

    def _clear(self) -> None:
        if self.configured == 1:
            for gradients in self.gradients:
                gradients.zero_()


class ClearedTooEarly(Zero1):
    """When one bucket is reduced, the gradients of all others are cleared (DS PR#1273).

    Flagged: gradient zero.
    """

    def _reduce(self) -> None:
        for gradients in self.gradients[1:]:
            gradients.zero_()
        super()._reduce()


class FirstMicrobatchDoubled(Zero1):
    """The contribution of the first microbatch to the buffer is added twice.

    Flagged: microbatch doubled.
    """

    def train_step(self, step: Step) -> StepReport:
        first, *rest = step.microbatches
        once = scaled(replace(step, microbatches=[first]), times=2).microbatches
        return super().train_step(replace(step, microbatches=[*once, *rest]))
