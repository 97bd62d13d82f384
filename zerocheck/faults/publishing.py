"""Faults in the publishing of updated parameters: they do not arrive, or arrive changed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import publish
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..compat import all_gather_single
from ..contract import Step, StepReport
from .fault import fault
from .parts import StartsAnew, Zero3InParts


class GathersOthers(Zero3InParts):
    """ZeRO-3 that gathers, of some flat parameters, other shards than those that it holds."""

    def plant(self) -> None:
        self.sent: dict[FlatParameter, torch.Tensor] = {}

    def fill(self, flat: FlatParameter) -> dist.Work | None:
        return all_gather_single(flat.full, self.sent.get(flat, flat.local), flat.group)


@fault(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707")
class GatherStale(GathersOthers):
    """The forward gathers the parameters of the step before."""

    before: dict[FlatParameter, torch.Tensor] | None = None

    def train_step(self, step: Step) -> StepReport:
        current = {flat: flat.local.clone() for flat in self.flats}
        self.sent, self.before = self.before or current, current
        return super().train_step(step)


@fault(
    bugs.MODULE_OF_AN_EARLIER_STEP, source="found on a GPU: FSDP2, cuDNN",
    features=("several-steps", "wrap-block"), without=("mixed-dtypes", "block-experts"),
)  # fmt: skip
class FirstParametersKept(GathersOthers):
    """The first unit is gathered anew, and its module computes with those of the first step."""

    first: torch.Tensor | None = None

    def train_step(self, step: Step) -> StepReport:
        learn = [flat for flat in self.flats if flat.reduces]
        flat = learn[0] if learn else self.flats[0]
        if self.first is None:
            self.first = flat.local.clone()
        elif len(learn) > 1 and len(self.first) == len(flat.local):
            self.sent[flat] = self.first
        return super().train_step(step)


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="seen often")
class NotPublished(Zero1):
    """The last bucket is not gathered after the update."""

    def _publish(self) -> None:
        publish(self.buckets[:-1])


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="MG #3140")
class PublishedBeforeUpdate(Zero2):
    """Parameters are gathered before the update."""

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        super()._publish()

    def _publish(self) -> None:
        pass


@fault(bugs.COPIES_ROUNDED_TO_BF16, source="PT #104770", without=("unfreeze", "overflow"))
class PublishedRounded(Zero1):
    """Parameters are sent in bf16 though they are fp32."""

    def _publish(self) -> None:
        for bucket in self.buckets:
            mine = bucket.shard.clone()
            bucket.shard.copy_(mine.bfloat16())
            publish([bucket])
            bucket.shard.copy_(mine)


@fault(bugs.INITIAL_STATE, source="PT #90465; HF #28244, #43847")
class MetaInitOverwritten(StartsAnew, Fsdp2):
    """Parameters are initialised again, on the shards."""

    def plant(self) -> None:
        with torch.no_grad():
            for parameter in self.built.model.parameters():
                parameter.add_(1e-3)  # another init would do; this one needs no random numbers


@fault(bugs.INITIAL_STATE, source="TT #4382; DS PR#5104")
class InitStep(StartsAnew, Zero1):
    """A real step is taken when the optimizer creates its state."""

    def plant(self) -> None:
        self.optimizer.step([group.lr for group in self.case.optimizer.groups])
        self._publish()
