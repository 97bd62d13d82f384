"""Faults in restoring a state of mid-training, as after loading a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..adapters.textbook.zero1 import Zero1

Full = Mapping[tuple[str, str], torch.Tensor]


class StepLostOnLoad(Zero1):
    """The step count restarts (DS PR#564, #5263). Flagged: initial state."""

    def restore(self, full: Full) -> None:
        super().restore(
            {key: torch.zeros(()) if key[1] == "step" else one for key, one in full.items()}
        )


class NoGatherAfterLoad(Zero1):
    """Each rank loads the parameters that it updates, and none are sent (MG #6920).

    Flagged: initial state.
    """

    def restore(self, full: Full) -> None:
        old = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        super().restore(full)
        mine = [bucket.shard.clone() for bucket in self.buckets]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.detach().copy_(old[name])
        for bucket, shard in zip(self.buckets, mine, strict=True):
            bucket.shard.copy_(shard)


class StateStaleAfterLoad(Zero1):
    """The state is loaded into an optimizer that is not the one that steps (MG #761).

    Flagged: initial state, of the moments.
    """

    def restore(self, full: Full) -> None:
        super().restore(full)
        self.optimizer.optimizer.state.clear()
