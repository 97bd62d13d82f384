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

    held: whole copies that differ; wanted: the expected gradient.
    """
    if not held.whole_everywhere:
        return held
    whole = held.whole.clone()
    for place in layout.places:
        here = slice(place.start, place.stop)
        copies = [part[here] for part in held.parts]
        if place.start == place.stop or all(torch.equal(copies[0], one) for one in copies[1:]):
            continue
        enclosure = wanted.at(here)
        right = (one for one in copies if compare(one.double(), enclosure)[1] is None)
        chosen = next(right, None)
        if chosen is None:
            chosen = max(copies, key=lambda one: _along(one, enclosure.exact))
        whole[here] = chosen
    return replace(held, whole=whole, parts=(whole,) * len(held.parts))


def _along(copy: torch.Tensor, direction: torch.Tensor) -> float:
    """Cosine between a copy and a direction, 0 where either is 0 or not finite."""
    cosine = torch.nn.functional.cosine_similarity(copy.double(), direction, dim=0)
    return float(cosine.nan_to_num(nan=0.0))
