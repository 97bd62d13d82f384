"""A gradient that the implementation does not show, recovered from the first moment.

    exp_avg' = b1 exp_avg + (1 - b1) g   =>   g = (exp_avg' - b1 exp_avg) / (1 - b1) +- E / (1 - b1)

with E the enclosure of exp_avg's update: usually 1e-6 relative, so a wrong scale is seen as
clearly as in a gradient that is shown. With clipping it is the clipped gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..case.schema import Case
from ..contract.groups import learning_rates
from ..contract.semantics import Semantics
from . import bounds
from .assemble import Held, Plan
from .bounds import Enclosure, U
from .clip import coefficient
from .gradient import Expected
from .layout import Layout
from .state import State


class Recovered(NamedTuple):
    """held: the gradient as one rank would show it, fp32; error: what is not known of each element
    of the flat vector, float64."""

    held: Held
    error: torch.Tensor


def recover(before: State, after: State, layout: Layout, case: Case, *, step: int) -> Recovered:
    """The gradient that explains the step of exp_avg, where the step count went up.

    Elements of other parameters hold NaN in `held.whole` and have no error.
    """
    moved = [
        place.trainable and then is not None and now is not None and now > then
        for place, then, now in zip(layout.places, before.steps, after.steps, strict=True)
    ]
    whole = torch.full((layout.size,), torch.nan)
    error = torch.zeros(layout.size, dtype=torch.float64)
    rates = learning_rates(case, step)
    keys = [1 if flag else None for flag in moved]
    for group, _, elements in layout.segments(keys):
        options = case.optimizer.groups[group]
        scalars = bounds.scalars(
            lr=rates[group],
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            step=1,
            reading="double",
        )
        positions = slice(None) if elements is None else elements
        m0 = before.moment("exp_avg")[positions].to(torch.float64)
        m1 = after.moment("exp_avg")[positions].to(torch.float64)
        w = 1 - options.beta1
        g = (m1 - options.beta1 * m0) / w
        # The last term: g is kept in fp32. A weight that was read in fp32 is 2 u off.
        unknown = bounds.exp_avg(m0, g, scalars).bound / w + 3 * U * (
            g.abs() + options.beta1 * m0.abs() / w
        )
        error[positions] = unknown * bounds.SECOND_ORDER
        whole[positions] = (-g if case.optimizer.maximize else g).float()
    present = frozenset(p.name for p, flag in zip(layout.places, moved, strict=True) if flag)
    absent = frozenset(p.name for p in layout.places if p.trainable) - present
    index = layout.spread(moved).nonzero().reshape(-1)
    plan = Plan(index, present, absent)
    return Recovered(Held(whole, (whole[index],), (plan,), ((),)), error)


def expected(wanted: Expected, error: torch.Tensor, case: Case, semantics: Semantics) -> Expected:
    """What the recovered gradient must be: the reduced one, clipped if the case clips.

    The norm is that of the exact gradient. The implementation's may be off by the rounding of the
    gradient and of its own summation: both enter the bound, relative to the element.
    """
    exact, bound = wanted.enclosure
    if case.training.clip is not None:
        order = 2.0 if case.training.norm == "2" else torch.inf
        norm = float(torch.linalg.vector_norm(exact, ord=order))
        off = float(torch.linalg.vector_norm(bound, ord=order)) / norm if norm else 0.0
        factor = coefficient(norm, case, semantics)
        relative = bounds.norm_relative(exact.numel()) + off + 4 * U
        exact = exact * factor
        bound = bound * factor + relative * exact.abs() + bounds.ETA
    return Expected(Enclosure(exact, bound + error), wanted.used)
