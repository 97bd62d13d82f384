"""Causes of errors of tensor parallelism: pieces of a wrong axis.

Of W ranks, T shard each layer, and D = W / T are data-parallel: rank d T + t has coordinate d on
the shard axis and t on the tp axis. A tensor that is sharded along dim 0 over both is sharded over
tp first: its piece number t D + d belongs to rank d T + t.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case
from ...case.tensor_parallel import plan_of, sharded_dim
from ...protocol.verdicts import Violation
from ..compare import same_bits
from ..layout import ParameterLayout


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
