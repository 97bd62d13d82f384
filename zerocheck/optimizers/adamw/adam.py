"""Adam: AdamW on the gradient with the decay added to it, d = g + weight_decay p.

Kingma & Ba, "Adam: A Method for Stochastic Optimization" (arXiv 1412.6980), with L2 regularization
as torch.optim.Adam has it. Both moments take d in place of g, and the parameter does not shrink on
its own. So each enclosure is AdamW's, for a gradient that is d and known to within the roundings
of that sum (`coupled_decay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerocheck_reference import AdamWOptions

from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import FP32, Enclosure, Format
from ..coupled_decay import decayed, product, stored
from ..specification import Hidden, Interval, OptimizerTrial, States, UpdateElements
from .bounds import Scalars
from .optimizer import STATES, AdamW


class Adam(AdamW):
    """Adam; amsgrad and maximize are options."""

    kind: OptimizerKind = "adam"
    name = "Adam"
    torch_class: type[torch.optim.Optimizer] = torch.optim.Adam
    lookalikes: tuple[type[torch.optim.Optimizer], ...] = ()
    couples_decay = True
    trial = OptimizerTrial(dict(AdamW.trial.options), STATES[:2])

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say that the decay is decoupled from the gradient, as AdamW's is."""
        if not group["weight_decay"] or not group.get("decoupled_weight_decay", False):
            return ""
        return f"applies its weight decay of {group['weight_decay']:g} apart from the gradient"

    def enclosures(
        self, elements: UpdateElements, scalars: Scalars
    ) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the moments and, from the new ones as they were observed, the parameter."""
        return super().enclosures(with_decay(elements, scalars.weight_decay), plain(scalars))

    def recovered(self, old: States, new: States, scalars: Scalars, format: Format) -> Interval:
        """Recover the gradient from what entered exp_avg, which is d: g = d - weight_decay p."""
        d = super().recovered(old, new, scalars, format)
        decay = scalars.weight_decay
        if decay == 0:
            return d
        term = decay * old["parameter"]
        error = product(term, format) + format.u * (d.middle.abs() + d.error)
        return Interval(d.middle - term, d.error + error)

    def range(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Scalars
    ) -> Enclosure:
        """Enclose the next parameter where the moments are known as intervals only."""
        inside = _interval(parameter, gradient, scalars)
        return super().range(parameter, hidden, inside, plain(scalars))

    def hidden_after(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Scalars
    ) -> dict[str, Interval]:
        """Enclose the moments after a step."""
        inside = _interval(parameter, gradient, scalars)
        return super().hidden_after(parameter, hidden, inside, plain(scalars))

    def reference_options(self, group: Group, options: Optimizer) -> AdamWOptions:
        """Return the options of a group for the trainer of the reference."""
        return dataclasses.replace(super().reference_options(group, options), decoupled=False)


def plain(scalars: Scalars) -> Scalars:
    """Return the scalars of AdamW without a decay of its own."""
    return scalars._replace(weight_decay=0.0)


def with_decay(e: UpdateElements, decay: float) -> UpdateElements:
    """Return the elements with d, and its error, for their gradient."""
    d = stored(decayed(e.parameter, e.gradient, decay, e.error, e.format), decay, e.format)
    return e._replace(gradient=d.exact, error=d.error)


def _interval(p: torch.Tensor, gradient: Interval, s: Scalars) -> Interval:
    """Enclose d of a gradient that is known as an interval; in fp32, as all hidden states."""
    d = stored(decayed(p, gradient.middle, s.weight_decay, gradient.error), s.weight_decay, FP32)
    return Interval(*d)
