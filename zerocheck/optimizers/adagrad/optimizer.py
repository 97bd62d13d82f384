"""Adagrad and RMSprop: their states, their step, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...case.schema import Group, Optimizer
from ...floating_point import Enclosure
from ..specification import (
    Change,
    OptimizerTrial,
    OptionFields,
    Reading,
    SegmentStep,
    StateRole,
    UpdateElements,
)
from ..unsharded.optimizer import Unsharded
from . import bounds
from .bounds import SquareScalars
from .changes import changes


class DividesBySquares(Unsharded):
    """Optimizer whose step is divided by the root of squares. Free runs take torch's own steps."""

    itself = False
    readings: tuple[Reading, ...] = ("double",)
    squares: StateRole
    """Role of the sum or the average of squares."""

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> SquareScalars:
        """Return the options of a group for one step."""
        kept, taken = self._weights(group)
        return SquareScalars(lr, kept, taken, group.eps, group.weight_decay, options.momentum)

    def _weights(self, group: Group) -> tuple[float, float]:
        """Return the factors of the old squares and of the new ones."""
        return 1.0, 1.0

    def enclosures(
        self, elements: UpdateElements, scalars: SquareScalars
    ) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the states and, from the new ones as they were observed, the parameter."""
        e, s, format = elements, scalars, elements.format
        d = bounds.direction(e.parameter, e.gradient, s, e.error, format)
        v = e.new[self.squares]
        yield self.squares, bounds.squares(e.old[self.squares], d, s, format)
        if s.momentum:
            old, new = e.old["momentum_buffer"], e.new["momentum_buffer"]
            yield "momentum_buffer", bounds.momentum_buffer(old, d, v, s, format)
            yield "parameter", bounds.along_buffer(e.parameter, new, s, format)
        else:
            yield "parameter", bounds.parameter(e.parameter, d, v, s, format)

    def changes(self, step: SegmentStep) -> Iterator[Change]:
        """Iterate over the changes that this rule alone may have."""
        return changes(step, self.squares)


class Adagrad(DividesBySquares):
    """Adagrad, without a decay of the learning rate."""

    squares = "sum"

    def __init__(self) -> None:
        super().__init__(
            "adagrad",
            torch.optim.Adagrad,
            ("sum",),
            OptionFields(("lr", "eps", "weight_decay"), ("maximize",)),
            lambda group, options: {"eps": group.eps, "weight_decay": group.weight_decay},
            states_at_once=True,
            fused=True,
        )
        self.trial = OptimizerTrial({"lr": 2.0**-6, "weight_decay": 2.0**-3}, ("sum",))

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say that the learning rate decays."""
        decay = group.get("lr_decay", 0)
        return f"has an lr_decay of {decay:g}" if decay else ""


class RMSprop(DividesBySquares):
    """RMSprop, not centered; beta2 of a case is its alpha."""

    squares = "square_avg"

    def __init__(self) -> None:
        super().__init__(
            "rmsprop",
            torch.optim.RMSprop,
            ("square_avg",),
            OptionFields(("lr", "beta2", "eps", "weight_decay"), ("momentum", "maximize")),
            lambda group, options: {
                "alpha": group.beta2,
                "eps": group.eps,
                "weight_decay": group.weight_decay,
                "momentum": options.momentum,
            },
            optional=lambda options: ("momentum_buffer",) if options.momentum else (),
        )
        options = {"lr": 2.0**-6, "alpha": 0.875, "momentum": 0.5, "weight_decay": 2.0**-3}
        self.trial = OptimizerTrial(options, ("square_avg",))

    def _weights(self, group: Group) -> tuple[float, float]:
        return group.beta2, 1 - group.beta2

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case that a group of torch.optim.RMSprop has."""
        found = super().read_group({n: one for n, one in group.items() if n != "beta2"})
        return {**found, "beta2": group["alpha"]} if "alpha" in group else found

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say that the average of gradients is subtracted."""
        return "is centered" if group.get("centered", False) else ""
