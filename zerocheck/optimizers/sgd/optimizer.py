"""SGD: its state, its step, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerocheck_reference import SGDOptions

from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import Enclosure, Format
from ..specification import (
    Hidden,
    Interval,
    OptimizerTrial,
    OptionFields,
    Reading,
    StateRole,
    States,
    UpdateElements,
    UpdateRule,
)
from . import bounds, ranges
from .bounds import SGDScalars
from .changes import changes

STATES: tuple[StateRole, ...] = ("momentum_buffer",)

LARGEST = 100.0
"""Gradients that drawn buffers are made of. Unlike AdamW's, the step of SGD grows with them: the
model would leave the finite numbers within a few steps."""


class SGD(UpdateRule):
    """SGD with momentum, without dampening; nesterov and maximize are options."""

    kind: OptimizerKind = "sgd"
    name = "SGD"
    torch_class: type[torch.optim.Optimizer] = torch.optim.SGD
    lookalikes: tuple[type[torch.optim.Optimizer], ...] = ()
    trial = OptimizerTrial({"lr": 2.0**-6, "momentum": 0.875, "weight_decay": 2.0**-3}, STATES)
    states = STATES
    hidden = STATES
    counts_steps = False
    whole = False
    readings: tuple[Reading, ...] = ("double",)
    fields = OptionFields(("lr", "weight_decay"), ("momentum", "nesterov", "maximize"))

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the momentum buffer, where there is a momentum."""
        return STATES if options.momentum else ()

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of torch.optim.SGD."""
        return {
            "lr": group.lr,
            "momentum": options.momentum,
            "dampening": 0.0,
            "weight_decay": group.weight_decay,
            "nesterov": options.nesterov,
            "maximize": options.maximize,
            "foreach": options.kernel == "foreach",
            "fused": options.kernel == "fused",
        }

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say that there is dampening."""
        dampening = group.get("dampening", 0)
        return f"has a dampening of {dampening:g}" if dampening else ""

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of the buffer, up to LARGEST."""
        return min(scale, LARGEST)

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw a buffer as of gradients of the size `scale`, up to LARGEST."""
        buffer = torch.empty_like(parameter).uniform_(-1.0, 1.0, generator=generator)
        buffer.mul_(self.size_of("momentum_buffer", scale))
        return {"momentum_buffer": buffer} if options.momentum else {}

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> SGDScalars:
        """Return the hyperparameters of a group."""
        return SGDScalars(lr, options.momentum, group.weight_decay, options.nesterov)

    def enclosures(
        self, elements: UpdateElements, scalars: SGDScalars
    ) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the buffer and, from the new one as it was observed, the parameter."""
        p, g, old, new, error, format = elements[:6]
        after = new.get("momentum_buffer", torch.zeros_like(p))
        if scalars.momentum:
            before = old["momentum_buffer"]
            yield ("momentum_buffer", bounds.momentum_buffer(p, before, g, scalars, error, format))
        yield "parameter", bounds.parameter(p, after, g, scalars, error, format)

    changes = staticmethod(changes)

    def recovered(self, old: States, new: States, scalars: SGDScalars, format: Format) -> Interval:
        """Recover the gradient from the buffer, or without one from the parameter."""
        return ranges.recovered(old, new, scalars, format)

    def range(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: SGDScalars
    ) -> Enclosure:
        """Enclose the next parameter where the buffer is known as an interval only."""
        return ranges.parameter_after(parameter, hidden["momentum_buffer"], gradient, scalars)

    def hidden_after(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: SGDScalars
    ) -> dict[str, Interval]:
        """Enclose the buffer after a step."""
        after = ranges.buffer_after(parameter, hidden["momentum_buffer"], gradient, scalars)
        return {"momentum_buffer": after}

    def reference_options(self, group: Group, options: Optimizer) -> SGDOptions:
        """Return the options of a group for the trainer of the reference."""
        return SGDOptions(
            lr=group.lr,
            momentum=options.momentum,
            weight_decay=group.weight_decay,
            nesterov=options.nesterov,
            maximize=options.maximize,
        )
