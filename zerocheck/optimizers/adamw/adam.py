"""Adam: AdamW on the gradient with the decay added to it, d = g + weight_decay p.

Kingma & Ba, "Adam: A Method for Stochastic Optimization" (arXiv 1412.6980), with L2 regularization
as torch.optim.Adam has it. Both moments take d in place of g, and the parameter does not shrink on
its own. So each enclosure is AdamW's, for a gradient that is d and known to within the roundings
of that sum (`coupled_decay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from msgspec.structs import replace

from zerocheck_reference import AdamWOptions

from ... import causes as bugs
from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import FP32, Enclosure, Format, all_inside
from ..coupled_decay import decayed, product, stored
from ..specification import Equation, Interval, OptimizerTrial, Segment, UpdateElements
from . import bounds
from . import variants as known
from .bounds import Scalars
from .optimizer import STATES, AdamW

Named = Iterator[tuple[str, Enclosure]]


class Adam(AdamW):
    """Adam; amsgrad and maximize are options."""

    kind: OptimizerKind = "adam"
    name = "Adam"
    torch_class: type[torch.optim.Optimizer] = torch.optim.Adam
    lookalikes: tuple[type[torch.optim.Optimizer], ...] = ()
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

    def variants(self, segment: Segment) -> Named:
        """Enclose what Adam would compute with each known mistake."""
        yield from known.variants(_with_decay(segment))
        if segment.role == "parameter":
            yield from _decay_of_parameter(segment)
        elif segment.role in STATES[:2]:
            yield from _decay_of_moment(segment)

    def equations(self, segment: Segment) -> Iterator[Equation]:
        """Iterate over the lines of Adam's step, the right one first."""
        yield from super().equations(_with_decay(segment))
        e, s, role = segment.elements, segment.scalars, segment.role
        if role not in STATES[:2]:
            return
        beta = s.beta1 if role == "exp_avg" else s.beta2
        for words, decay in (
            ("no weight decay", 0.0),
            ("twice the weight decay", 2 * s.weight_decay),
            *(
                (f"weight_decay of another group ({g.pattern!r})", g.weight_decay)
                for g, _ in segment.others
            ),
        ):
            if decay == s.weight_decay:
                continue
            d = decayed(e.parameter, e.gradient, decay).exact
            taken = d if role == "exp_avg" else d * d
            terms = {"the old moment": e.old[role], "the gradient": taken}
            right = dict(zip(terms, (beta, 1 - beta), strict=True))
            yield Equation(f"with {words} in the gradient", terms, right, {})

    def recovered(
        self,
        old: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        scalars: Scalars,
        format: Format,
    ) -> Interval:
        """Recover the gradient from what entered exp_avg, which is d: g = d - weight_decay p."""
        d = super().recovered(old, new, scalars, format)
        decay = scalars.weight_decay
        if decay == 0:
            return d
        term = decay * old["parameter"]
        error = product(term, format) + format.u * (d.middle.abs() + d.error)
        return Interval(d.middle - term, d.error + error)

    def range(
        self,
        parameter: torch.Tensor,
        hidden: Mapping[str, Interval],
        gradient: Interval,
        scalars: Scalars,
    ) -> Enclosure:
        """Enclose the next parameter where the moments are known as intervals only."""
        inside = _interval(parameter, gradient, scalars)
        return super().range(parameter, hidden, inside, plain(scalars))

    def hidden_after(
        self,
        parameter: torch.Tensor,
        hidden: Mapping[str, Interval],
        gradient: Interval,
        scalars: Scalars,
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


def with_decay(e: UpdateElements, decay: float, g: torch.Tensor | None = None) -> UpdateElements:
    """Return the elements with d, and its error, for their gradient. g: another gradient."""
    g = e.gradient if g is None else g
    d = stored(decayed(e.parameter, g, decay, e.error, e.format), decay, e.format)
    return e._replace(gradient=d.exact, error=d.error)


def _interval(p: torch.Tensor, gradient: Interval, s: Scalars) -> Interval:
    """Enclose d of a gradient that is known as an interval; in fp32, as all hidden states."""
    d = stored(decayed(p, gradient.middle, s.weight_decay, gradient.error), s.weight_decay, FP32)
    return Interval(*d)


def _with_decay(segment: Segment) -> Segment:
    """Return the segment as AdamW's without a decay of its own: all of its gradients have it."""
    e, decay = segment.elements, segment.scalars.weight_decay

    def d(gradient: torch.Tensor) -> torch.Tensor:
        return decayed(e.parameter, gradient, decay).exact

    def gradients() -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, d(gradient)) for name, gradient in segment.gradients())

    return segment._replace(
        elements=with_decay(e, decay),
        scalars=plain(segment.scalars),
        unclipped=None if segment.unclipped is None else d(segment.unclipped),
        previous=None if segment.previous is None else d(segment.previous),
        in_memory=[d(one) for one in segment.in_memory],
        gradients=gradients,
        others=[(replace(group, weight_decay=0.0), rate) for group, rate in segment.others],
    )


def _of_moment(segment: Segment, decay: float, g: torch.Tensor | None = None) -> Enclosure:
    """Enclose the moment of the segment with another decay, or another gradient."""
    e = with_decay(segment.elements, decay, g)
    formula = bounds.exp_avg if segment.role == "exp_avg" else bounds.exp_avg_sq
    return formula(e.old[segment.role], e.gradient, segment.scalars, e.error, e.format)


def _decay_of_moment(segment: Segment) -> Named:
    """Mistakes in the decay that enters the moments."""
    e, decay = segment.elements, segment.scalars.weight_decay
    if decay:
        yield _without_decay(segment), _of_moment(segment, 0.0)
        yield bugs.WEIGHT_DECAY_TWICE, _of_moment(segment, 2 * decay)
        if segment.role == "exp_avg":
            yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, _of_moment(segment, decay, -e.gradient)
    for group, _ in segment.others:
        if group.weight_decay != decay:
            name = bugs.OPTIONS_OF_ANOTHER_GROUP
            name = name if decay else bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS
            yield name, _of_moment(segment, group.weight_decay)


def _decay_of_parameter(segment: Segment) -> Named:
    """Enclose a parameter that shrinks on its own as well, or in place of the decay in d."""
    if segment.scalars.weight_decay:
        right = all_inside(segment.elements.new["exp_avg"], _right_exp_avg(segment))
        name = bugs.WEIGHT_DECAY_TWICE if right else bugs.DECOUPLED_INSTEAD_OF_L2
        yield name, _shrunk(segment)


def _right_exp_avg(segment: Segment) -> Enclosure:
    return _of_moment(segment._replace(role="exp_avg"), segment.scalars.weight_decay)


def _shrunk(segment: Segment) -> Enclosure:
    """Enclose AdamW's parameter, from the moments as they were observed."""
    e = segment.elements
    return bounds.parameter(
        e.parameter, e.new["exp_avg"], known.largest(e), segment.scalars, e.format
    )


def _without_decay(segment: Segment) -> str:
    """Return the cause of a missing decay: the parameter may have it decoupled."""
    after = segment.parameter_after
    if after is None or not all_inside(after, _shrunk(segment)):
        return bugs.WEIGHT_DECAY_MISSING
    e = segment.elements
    alone = bounds.parameter(
        e.parameter, e.new["exp_avg"], known.largest(e), plain(segment.scalars), e.format
    )
    return bugs.WEIGHT_DECAY_MISSING if all_inside(after, alone) else bugs.DECOUPLED_INSTEAD_OF_L2
