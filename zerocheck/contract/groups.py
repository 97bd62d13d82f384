"""Parameter groups by name pattern, and learning rates per step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..case.schema import Case
from ..case.shapes import unfrozen
from ..errors import UsageError
from .names import unwrapped


def group_of(case: Case, name: str) -> int:
    """Index of the first group whose pattern matches the parameter name.

    Raises UsageError if no pattern matches.
    """
    for index, group in enumerate(case.optimizer.groups):
        if fnmatchcase(name, group.pattern):
            return index
    patterns = ", ".join(repr(group.pattern) for group in case.optimizer.groups)
    raise UsageError(f"parameter {name!r} matches no group pattern of the case ({patterns})")


def grouped(case: Case, named_tensors: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups for `torch.optim.AdamW`, one per group of the case, in its order.

    `named_tensors`: (name of the unwrapped model, tensor to optimize). Every option of the case is
    in the groups, so that `AdamW(groups)` needs no other. Empty groups are kept, so that group i of
    the optimizer is group i of the case.
    """
    optimizer = case.optimizer
    groups: list[dict[str, Any]] = [
        {
            "params": [],
            "lr": group.lr,
            "betas": (group.beta1, group.beta2),
            "eps": group.eps,
            "weight_decay": group.weight_decay,
            "amsgrad": optimizer.amsgrad,
            "maximize": optimizer.maximize,
            "foreach": optimizer.kernel == "foreach",
            "fused": optimizer.kernel == "fused",
        }
        for group in optimizer.groups
    ]
    for name, tensor in named_tensors:
        groups[group_of(case, name)]["params"].append(tensor)
    return groups


def groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    """Parameter groups of the trainable parameters of a model, wrapped or not.

    Those that the case unfreezes later are in them from the start: torch's optimizers skip a
    parameter without a gradient.
    """
    later = set(unfrozen(case))
    named = ((unwrapped(name), p) for name, p in model.named_parameters())
    return grouped(case, ((name, p) for name, p in named if p.requires_grad or name in later))


def learning_rates(case: Case, index: int) -> list[float]:
    """Learning rate of each group at step `index` (0-based) of the case, in Python floats."""
    done = case.start.step + index
    match case.optimizer.schedule:
        case "constant":
            factor = 1.0
        case "warmup":
            factor = min(1.0, (done + 1) / 4)
        case "cosine":
            factor = 0.55 + 0.45 * math.cos(math.pi * (done % 8) / 8)
    return [group.lr * factor for group in case.optimizer.groups]
