"""Gradients of which only the owner's copy counts, where the owners are not known.

An optimizer of the user's own may reduce each gradient to the rank that updates the parameter; what
the other ranks have in `.grad` then means nothing. So of unequal copies one that is right is taken.
If none is, the violation is certain, and the copy that points most in the right direction is shown:
it is the likeliest to have a cause. A wrong owner's copy beside another right one shows in the
update, which is judged by the right gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .assemble import RoleState
from .compare import compare
from .layout import ParameterLayout
from .pieces import Enclosing


def owners_copies(held: RoleState, wanted: Enclosing, layout: ParameterLayout) -> RoleState:
    """Return the gradient as if every rank held the copy that counts.

    held: copies that differ, of whole tensors; wanted: the expected gradient.
    """
    whole = held.whole.clone()
    vectors = [held.as_of(rank) for rank in range(len(held.parts))]
    for place in layout.places:
        here = slice(place.start, place.stop)
        copies = [
            vector[here]
            for vector, plan in zip(vectors, held.plans, strict=True)
            if place.name in plan.present
        ]
        if place.start == place.stop or all(torch.equal(copies[0], copy) for copy in copies[1:]):
            continue
        enclosure = wanted.at(here)
        right = (copy for copy in copies if compare(copy.double(), enclosure)[1] is None)
        chosen = next(right, None)
        if chosen is None:
            chosen = max(copies, key=lambda copy: _along(copy, enclosure.exact))
        whole[here] = chosen
    parts = [whole if plan.index is None else whole[plan.index] for plan in held.plans]
    return replace(held, whole=whole, parts=tuple(parts))


def _along(copy: torch.Tensor, direction: torch.Tensor) -> float:
    """Cosine between a copy and a direction, 0 where either is 0 or not finite."""
    cosine = torch.nn.functional.cosine_similarity(copy.double(), direction, dim=0)
    return float(cosine.nan_to_num(nan=0.0))
