"""Optimizers around another: wrappers that call it, and those whose ranks each own a part.

Accelerate, Lightning and Fabric wrap the optimizer of the script. ZeroRedundancyOptimizer, and the
OSS of fairscale, have one of their own for the parameters that this rank owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, AdamW, Optimizer

from ..errors import UsageError

INNER = ("optimizer", "optim")
"""Attributes under which an optimizer keeps the one that it is around."""


def observed_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer below the wrappers, whose `step` is observed.

    Raises UsageError for what is no torch optimizer and has none inside.
    """
    inner = _inner(optimizer)
    while inner is not None and _parameters(inner) == _parameters(optimizer):
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            break
        optimizer, inner = inner, _inner(inner)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"attach needs a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def owned_part(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of the parameters that this rank owns; itself where it owns all."""
    return _inner(optimizer) or optimizer


def states_of(optimizer: Optimizer) -> Mapping[Any, Mapping[str, Any]]:
    """Return the states that this rank holds, by the optimizer's parameters."""
    return owned_part(optimizer).state


def check_kind(optimizer: Optimizer) -> None:
    """Raise UsageError unless the optimizer's update is that of AdamW, within its `step`."""
    if isinstance(optimizer, ZeroRedundancyOptimizer) and vars(optimizer).get("_overlap_with_ddp"):
        raise UsageError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates within the backward, where "
            "no step can be seen (allowed: overlap_with_ddp=False)"
        )
    inner = owned_part(optimizer)
    allowed = "allowed: torch.optim.AdamW, its subclasses, Adam without weight decay, and these in "
    allowed += "ZeroRedundancyOptimizer or a wrapper that has them as .optimizer or .optim"
    if not isinstance(inner, (AdamW, Adam)):
        raise UsageError(f"attach judges AdamW, got {type(inner).__name__} ({allowed})")
    for number, group in enumerate(inner.param_groups):
        decoupled = group.get("decoupled_weight_decay", isinstance(inner, AdamW))
        if group["weight_decay"] and not decoupled:
            raise UsageError(
                f"attach judges AdamW; parameter group {number} of this {type(inner).__name__} "
                f"adds its weight decay of {group['weight_decay']:g} to the gradient ({allowed})"
            )


def _inner(optimizer: Any) -> Optimizer | None:
    """Return the wrapped optimizer, whose parameters all belong to the outer one."""
    for name in INNER:
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and _parameters(inner) <= _parameters(optimizer):
            return inner
    return None


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", None) or ()
    return {id(parameter) for group in groups for parameter in group["params"]}
