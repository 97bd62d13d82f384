"""Faults in restoring a state of mid-training, as after loading a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from .fault import fault

Full = Mapping[tuple[str, str], torch.Tensor]


@fault(
    "zero1", "publish", bugs.INITIAL_STATE, source="DS PR#564, #5263", features=("mid-training",)
)
class StepLostOnLoad(Zero1):
    """The step count of a restored state restarts."""

    def restore(self, full: Full) -> None:
        super().restore(
            {key: torch.zeros(()) if key[1] == "step" else one for key, one in full.items()}
        )


@fault("zero1", "publish", bugs.COPIES_DIFFER, source="MG #6920", features=("mid-training",))
class NoGatherAfterLoad(Zero1):
    """Each rank loads the parameters that it updates, and none are sent."""

    def restore(self, full: Full) -> None:
        old = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        super().restore(full)
        mine = [bucket.shard.clone() for bucket in self.buckets]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.detach().copy_(old[name])
        for bucket, shard in zip(self.buckets, mine, strict=True):
            bucket.shard.copy_(shard)


@fault(
    "zero1", "publish", bugs.INITIAL_STATE, source="MG #761",
    features=("mid-training", "moments-typical"),
)  # fmt: skip
class StateStaleAfterLoad(Zero1):
    """The state is loaded into an optimizer that is not the one that steps."""

    def restore(self, full: Full) -> None:
        super().restore(full)
        self.optimizer.optimizer.state.clear()
