"""One rank is measured while it takes its steps: in which phase it is, and what it holds then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..case.schema import Case
from ..contract.implementation import Implementation, Moment, Step
from ..contract.layout import Layout, Phase
from ..models.network import build_model
from .observation import Measured

ALIKE = 2
"""Steps, at least, that must not grow, after the first that ends with all there is to have."""


def settled(case: Case) -> int:
    """Index of the first step that ends with all that training ever holds.

    The first step makes the optimizer's state, and so does the one that unfreezes parameters; not
    if it overflows, which puts it off.
    """
    training = case.training
    first = training.first if training.unfreeze is None else max(training.first, training.unfreeze)
    return first + (training.overflow == first)


def measured_end(case: Case) -> int:
    """Index after the last step that is measured: enough of them to see whether anything grows."""
    return max(case.training.steps, settled(case) + 1 + ALIKE)


class Measuring:
    """Follows one rank through its steps.

    step, part: where it is now; part is the phase that comes to its end next. What is noted of a
    collective is in this phase of this step.
    """

    def __init__(self, implementation: type[Implementation], case: Case, rank: int) -> None:
        self.case = case
        self.first, self.end = case.training.first, measured_end(case)
        self.step = self.first - 1
        self.part: Phase = "built"
        self.layout: Layout | None = implementation.layout(build_model(case), case, rank)
        self._losses = 0

    @contextmanager
    def watching(self) -> Iterator[Measuring]:
        """All that is allocated within it is accounted for."""
        yield self

    def built(self, subject: Implementation) -> None:
        """The implementation is constructed, and restored if the case starts in mid-training."""
        self._over(next_part="forward")

    def begun(self, index: int, step: Step) -> None:
        """A step is about to be taken."""
        self.step, self.part, self._losses = index, "forward", 0

    def entered(self) -> None:
        """A forward begins."""
        self.part = "forward"

    def seen(self, loss: torch.Tensor) -> None:
        """A forward is over."""
        self._losses += 1
        if self._losses == self.case.training.microbatches:
            self._over(next_part="backward")
        else:
            self.part = "backward"

    def reached(self, moment: Moment) -> None:
        """Gradients are reduced, or clipped."""
        if moment == "reduced":
            self._over(next_part="step")

    def taken(self) -> None:
        """`train_step` has returned."""
        self.part = "step"
        self._over(next_part="closed" if self.step == self.end - 1 else "forward")

    def closed(self) -> None:
        """`close` has returned, and nobody has the implementation any more."""
        self._over(next_part="closed")

    def measured(self) -> Measured:
        """All that was seen."""
        return Measured(layout=self.layout, steps=self.end - self.first)

    def _over(self, *, next_part: Phase) -> None:
        """The phase ends here."""
        self.part = next_part
