"""Faults of memory: every number is right, and a rank holds more than it should."""

from __future__ import annotations

import torch

from ...adapters.textbook.zero1 import Zero1
from ...adapters.textbook.zero2 import Zero2
from ..fault import fault
from ..parts import Plantable


@fault("persistent", source="CA PR#1955")
class GraphRetained(Zero2):
    """The backward keeps the graph, so activations live until the next loss replaces this one."""

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]


@fault("persistent", source="DS PR#5328", features=("compute-bf16", "reduce-wide"))
class NarrowGradientsKept(Zero1):
    """Gradients in bf16 are cleared and not freed after they were added to their fp32 sums."""

    def _add(self, total: torch.Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad.zero_()


@fault("persistent", source="DS PR#8029", features=("frozen",), without=("unfreeze",))
class FrozenInBuffers(Plantable, Zero1):
    """Flat buffers of gradients and masters have room for frozen parameters, too."""

    def plant(self) -> None:
        self.room = [
            torch.zeros_like(parameter, dtype=torch.float32) for _, parameter in self.replicated()
        ]

    def close(self) -> None:
        super().close()
        self.room.clear()
