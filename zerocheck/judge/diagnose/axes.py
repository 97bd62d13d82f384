"""Causes of errors along the axes of a mesh.

Under tensor parallelism, of W ranks, T shard each layer, and D = W / T are data-parallel: rank
d T + t has coordinate d on the shard axis and t on the tp axis. A tensor that is sharded along dim
0 over both is sharded over tp first: its piece number t D + d belongs to rank d T + t.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case
from ...case.tensor_parallel import plan_of, sharded_dim
from ...protocol.verdicts import Explanation, Violation
from ..compare import same_bits
from ..layout import ParameterLayout
from ..pieces import in_pieces
from .evidence import Evidence


def order_of_pieces(
    violation: Violation | None,
    actual: torch.Tensor,
    wanted: torch.Tensor,
    layout: ParameterLayout,
    case: Case,
) -> Violation | None:
    """Add the cause to an initial state's violation if its pieces have the order of a plain shard.

    actual, wanted: flat vectors of all parameters.
    """
    if violation is None or violation.role != "parameter":
        return violation
    places = [layout.by_name[name] for name in violation.tensors]
    for forth in (True, False):
        if all(
            same_bits(
                actual[place.start : place.stop],
                _reordered(wanted[place.start : place.stop], place.shape, case, forth=forth),
            )
            for place in places
        ):
            return replace(
                violation,
                causes=(bugs.PIECES_IN_THE_ORDER_OF_A_PLAIN_SHARD,),
                explanation=violation.explanation
                + "; its pieces are exchanged: what is sharded over the tp axis first was taken "
                "for what is sharded over it last",
            )
    return violation


def _reordered(
    flat: torch.Tensor, shape: tuple[int, ...], case: Case, *, forth: bool
) -> torch.Tensor:
    """Reorder pieces t D + d to d T + t, or back; unchanged unless W divides the rows."""
    if not shape or shape[0] % case.world_size:
        return flat
    sizes = (case.axes.size("tp"), case.axes.size("shard"))
    first, second = sizes if forth else sizes[::-1]
    return flat.view(first, second, -1).transpose(0, 1).reshape(-1)


def with_repeated_biases(
    parameters: torch.Tensor, layout: ParameterLayout, case: Case
) -> torch.Tensor:
    """Return the flat vector with each row-wise layer's bias counted once per tp rank."""
    count = case.axes.size("tp")
    plan = plan_of(case.model, count)
    changed = parameters.clone()
    for place in layout.places:
        layer, _, kind = place.name.rpartition(".")
        if kind == "bias" and layer in plan and sharded_dim(plan, place.name) is None:
            changed[place.start : place.stop] *= count
    return changed


def unreduced(evidence: Evidence, wrong: torch.Tensor) -> Explanation | None:
    """Return what is wrong if the sum or the mean of copies along one axis is right.

    Each copy is the sum of some of the terms of the right gradient, so that the sum of S copies is
    off by at most S times its bound. None for a model that is judged in pieces.
    """
    held, mesh, size = evidence.held, evidence.case.axes, evidence.layout.size
    if in_pieces(None, size):
        return None
    right, least = evidence.enclosure, 0
    for axis in mesh.axes:
        fits = set(("added up", "averaged") if axis.size > 1 else ())
        for group in mesh.groups(axis.name) if fits else ():
            total, copies = torch.zeros(2, size, dtype=torch.float64)
            for rank in group:
                index = held.plans[rank].index
                here = slice(None) if index is None else index
                total[here] += held.parts[rank].double()
                copies[here] += 1
            shared = wrong & (copies == axis.size)
            least = max(least, int(shared.sum()))
            if bool((wrong & (copies > 0) & (copies < axis.size)).any()):
                fits.clear()
            for words, factor in (("added up", 1.0), ("averaged", 1.0 / axis.size)):
                off = (factor * total - right.exact).abs() - axis.size * right.bound
                if bool((off[shared] > 0).any()):
                    fits.discard(words)
        if fits and least:
            text = f"the gradients of the ranks along {axis.name}, {min(fits)}, are right"
            text += ": they are not reduced over this axis"
            return Explanation(text, (bugs.NOT_REDUCED_OVER_AN_AXIS,))
    return None


def before_an_exchange(evidence: Evidence, wrong: torch.Tensor) -> Explanation | None:
    """Return what is wrong if ranks compute together, and some gradients are right: a hint."""
    mesh, layout, exact = evidence.case.axes, evidence.layout, evidence.enclosure.exact
    tensors = [slice(place.start, place.stop) for place in layout.places]
    moved = [tensor for tensor in tensors if bool(exact[tensor].any())]
    # The last tensor is behind all exchanges.
    if mesh.parts("activations") == 1 or not moved or bool(wrong[moved[-1]].any()):
        return None
    if not mesh.has("pp"):
        text = "the losses are right, and some gradients: what comes before an exchange of ranks "
        return Explanation(f"{text}is not", (bugs.EXCHANGE_WITHOUT_ITS_GRADIENT,))
    stages: dict[bool, set[int]] = {True: set(), False: set()}
    for rank, plan in enumerate(evidence.held.plans):
        index = slice(None) if plan.index is None else plan.index
        for kind, mask in ((True, layout.trainable & ~wrong), (False, wrong)):
            if bool(mask[index].any()):
                stages[kind].add(mesh.coordinate(rank, "pp"))
    if not stages[True] or max(stages[False]) >= min(stages[True] - stages[False], default=0):
        return None
    text = (
        "the losses are right, and the gradients of the last stages: those that come back are not"
    )
    return Explanation(text, (bugs.STAGES_EXCHANGE_OTHER_VALUES,))
