"""Muon: its state, its step, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from zerocheck_reference import MuonOptions

from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import SECOND_ORDER, Enclosure, Format, U
from ..specification import (
    Interval,
    OptimizerTrial,
    OptionFields,
    Reading,
    StateRole,
    States,
    UpdateElements,
    UpdateRule,
)
from . import bounds
from .bounds import MuonScalars
from .changes import changes

STATES: tuple[StateRole, ...] = ("momentum_buffer",)

NS_STEPS = 5
"""Iterations of torch.optim.Muon, at its default."""

LARGEST = 100.0
"""Gradients that drawn buffers are made of, at most: the step does not depend on their size."""


class Muon(UpdateRule):
    """torch.optim.Muon, of whole matrices; its momentum is an average."""

    kind: OptimizerKind = "muon"
    name = "Muon"
    torch_class: type[torch.optim.Optimizer] = torch.optim.Muon
    lookalikes: tuple[type[torch.optim.Optimizer], ...] = ()
    trial = OptimizerTrial(
        {"lr": 2.0**-6, "momentum": 0.875, "weight_decay": 2.0**-3},
        STATES,
        close=math.inf,  # classes of the user's own are the rule here: what is wrong is judged
    )
    states = STATES
    hidden: tuple[StateRole, ...] = ()
    counts_steps = False
    whole = True
    couples_decay = False
    one_by_one = True
    readings: tuple[Reading, ...] = ("same kernels", "estimated")
    fields = OptionFields(("lr", "weight_decay"), ("momentum", "nesterov"))

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the momentum buffer."""
        return STATES

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of torch.optim.Muon."""
        return {
            "lr": group.lr,
            "weight_decay": group.weight_decay,
            "momentum": options.momentum,
            "nesterov": options.nesterov,
            "adjust_lr_fn": options.adjustment,
        }

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of the buffer, up to LARGEST."""
        return min(scale, LARGEST)

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw a buffer as of gradients of the size `scale`, up to LARGEST."""
        buffer = torch.empty_like(parameter).uniform_(-1.0, 1.0, generator=generator)
        return {"momentum_buffer": buffer.mul_(self.size_of("momentum_buffer", scale))}

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> MuonScalars:
        """Return the hyperparameters of a group."""
        return MuonScalars(
            lr,
            options.momentum,
            group.weight_decay,
            options.nesterov,
            options.adjustment,
            NS_STEPS,
            reading == "estimated",
        )

    def enclosures(
        self, elements: UpdateElements, scalars: MuonScalars
    ) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the buffer and, from the new one as it was observed, the parameter."""
        old, new = (of["momentum_buffer"] for of in (elements.old, elements.new))
        yield (
            "momentum_buffer",
            bounds.momentum_buffer(
                old, elements.gradient, scalars.momentum, elements.error, elements.format
            ),
        )
        yield "parameter", bounds.parameter(elements, new, scalars)

    changes = staticmethod(changes)

    def recovered(self, old: States, new: States, scalars: MuonScalars, format: Format) -> Interval:
        """Recover the gradient from the buffer: g = (b' - mu b) / (1 - mu) +- E / (1 - mu)."""
        b, after, w = old["momentum_buffer"], new["momentum_buffer"], 1 - scalars.momentum
        g = (after - scalars.momentum * b) / w
        unknown = bounds.momentum_buffer(b, g, scalars.momentum, format=format).bound / w
        unknown = unknown / (1 - 4 * format.u) + U * g.abs()
        return Interval(g, unknown * SECOND_ORDER)

    def reference_options(self, group: Group, options: Optimizer) -> MuonOptions:
        """Return the options of a group for the trainer of the reference."""
        return MuonOptions(
            lr=group.lr,
            momentum=options.momentum,
            weight_decay=group.weight_decay,
            nesterov=options.nesterov,
            adjustment=options.adjustment,
            ns_steps=NS_STEPS,
        )
