"""AdamW: its states, its step, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerocheck_reference import AdamWOptions

from ... import causes as bugs
from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import SECOND_ORDER, Enclosure, Format, U
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
from .bounds import Scalars
from .changes import changes, largest

STATES: tuple[StateRole, ...] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(UpdateRule):
    """AdamW with decoupled weight decay; amsgrad and maximize are options."""

    kind: OptimizerKind = "adamw"
    name = "AdamW"
    torch_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    lookalikes: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam,)
    trial = OptimizerTrial(
        {"lr": 2.0**-6, "betas": (0.875, 0.9375), "eps": 2.0**-20, "weight_decay": 2.0**-3},
        STATES[:2],
    )
    states = STATES
    hidden = STATES[:2]
    counts_steps = True
    whole = False
    couples_decay = False
    readings: tuple[Reading, ...] = ("double", "single rate", "single")
    fields = OptionFields(("lr", "beta1", "beta2", "eps", "weight_decay"), ("amsgrad", "maximize"))

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the moments, with their maximum where amsgrad asks for it."""
        return STATES if options.amsgrad else STATES[:2]

    def swaps(self, role: str) -> Sequence[tuple[str, str]]:
        """Return the other moments; the maximum may be exp_avg_sq too."""
        swapped = bugs.MOMENTS_SWAPPED
        return {
            "exp_avg": ((swapped, "exp_avg_sq"), (swapped, "max_exp_avg_sq")),
            "exp_avg_sq": ((swapped, "exp_avg"), (swapped, "max_exp_avg_sq")),
            "max_exp_avg_sq": (
                (swapped, "exp_avg"),
                (bugs.MAX_EXP_AVG_SQ_FROM_EXP_AVG_SQ, "exp_avg_sq"),
            ),
        }.get(role, ())

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of torch.optim.AdamW."""
        return {
            "lr": group.lr,
            "betas": (group.beta1, group.beta2),
            "eps": group.eps,
            "weight_decay": group.weight_decay,
            "amsgrad": options.amsgrad,
            "maximize": options.maximize,
            "foreach": options.kernel == "foreach",
            "fused": options.kernel == "fused",
        }

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case that a parameter group of torch.optim.AdamW has."""
        names = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
        given = {name: group[name] for name in names if name in group}
        if "betas" in group:
            given["beta1"], given["beta2"] = group["betas"]
        return given

    def foreign_option(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        """Say that weight decay is added to the gradient, as Adam does."""
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if not group["weight_decay"] or decoupled:
            return ""
        return f"adds its weight decay of {group['weight_decay']:g} to the gradient"

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of a moment: exp_avg_sq and its maximum have the square."""
        return scale if role == "exp_avg" else scale**2

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw moments as of gradients of the size `scale`; exp_avg_sq has its square."""
        like = torch.empty_like
        first = like(parameter).uniform_(-1.0, 1.0, generator=generator).mul_(scale)
        second = like(parameter).uniform_(0.5, 1.5, generator=generator).mul_(scale**2)
        state: dict[StateRole, torch.Tensor] = {"exp_avg": first, "exp_avg_sq": second}
        if options.amsgrad:
            # Half of the elements are above exp_avg_sq, half are at it.
            above = like(parameter).uniform_(0.0, 2.0, generator=generator).clamp_(min=1.0)
            state["max_exp_avg_sq"] = second * above
        return state

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> Scalars:
        """Compute hyperparameters and bias corrections of update number `step` >= 1."""
        return bounds.scalars(
            lr=lr,
            beta1=group.beta1,
            beta2=group.beta2,
            eps=group.eps,
            weight_decay=group.weight_decay,
            step=step,
            reading=reading,
        )

    def enclosures(
        self, elements: UpdateElements, scalars: Scalars
    ) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the moments and, from the new ones as they were observed, the parameter."""
        p, g, old, new, error, format = elements[:6]
        yield "exp_avg", bounds.exp_avg(old["exp_avg"], g, scalars, error, format)
        yield "exp_avg_sq", bounds.exp_avg_sq(old["exp_avg_sq"], g, scalars, error, format)
        if "max_exp_avg_sq" in new:
            wanted = torch.maximum(old["max_exp_avg_sq"], new["exp_avg_sq"])
            yield "max_exp_avg_sq", Enclosure(wanted, torch.zeros_like(wanted))
        second = largest(elements)
        yield "parameter", bounds.parameter(p, new["exp_avg"], second, scalars, format)

    changes = staticmethod(changes)

    def recovered(self, old: States, new: States, scalars: Scalars, format: Format) -> Interval:
        """Recover the gradient that entered exp_avg.

        exp_avg' = b1 exp_avg + (1 - b1) g   =>   g = (exp_avg' - b1 exp_avg) / (1 - b1) +- E / (1 -
        b1), with E the enclosure of exp_avg's update: usually 1e-6 relative, so a wrong scale is
        seen as clearly as in a gradient that is shown. g is kept in fp32, and a weight that was
        read in fp32 is 2 u off: 3 u.
        """
        w, before, after = 1 - scalars.beta1, old["exp_avg"], new["exp_avg"]
        g = (after - scalars.beta1 * before) / w
        unknown = bounds.exp_avg(before, g, scalars, format=format).bound / w + 3 * U * (
            g.abs() + scalars.beta1 * before.abs() / w
        )
        if format.narrow:
            # The gradient that was may be larger by `unknown`: u w of it was not counted.
            unknown = unknown / (1 - format.u)
        return Interval(g, unknown * SECOND_ORDER)

    def range(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Scalars
    ) -> Enclosure:
        """Enclose the next parameter where the moments are known as intervals only."""
        low, high = ranges.update_range(_box(hidden, gradient), scalars)
        return ranges.parameter_after(parameter, low, high, scalars)

    def hidden_after(
        self, parameter: torch.Tensor, hidden: Hidden, gradient: Interval, scalars: Scalars
    ) -> dict[str, Interval]:
        """Enclose the moments after a step."""
        first, second = ranges.moments_after(_box(hidden, gradient), scalars)
        return {"exp_avg": Interval(*first), "exp_avg_sq": Interval(*second)}

    def reference_options(self, group: Group, options: Optimizer) -> AdamWOptions:
        """Return the options of a group for the trainer of the reference."""
        return AdamWOptions(
            lr=group.lr,
            beta1=group.beta1,
            beta2=group.beta2,
            eps=group.eps,
            weight_decay=group.weight_decay,
            amsgrad=options.amsgrad,
            maximize=options.maximize,
        )


def _box(hidden: Mapping[str, Interval], gradient: Interval) -> ranges.Box:
    return ranges.Box(*hidden["exp_avg"], *hidden["exp_avg_sq"], *gradient)
