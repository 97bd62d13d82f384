"""Trace of every collective that this rank calls, by a dispatch mode on torch's `c10d` operators.

It sees what Python wrappers do not: DDP's reducer, FSDP2's backward, the norm of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..compat import Operators

NAMESPACES = ("c10d", "_c10d_functional")
GROUPS = ("process_group", "group_name")
"""What an operator's group is called in its schema. `wait_tensor` and its like have none."""


def is_collective(func: Any) -> bool:
    """Return True for an operator that communicates, or at least starts to."""
    return func.namespace in NAMESPACES and any(
        argument.name in GROUPS for argument in func._schema.arguments
    )


def name_of(func: Any) -> str:
    """Return an operator's name without namespace, and without the underscore of in-place ones."""
    return str(func._schema.name.partition("::")[2].rstrip("_"))


class CollectiveTrace(Operators):
    """Context that calls `note("allreduce(12)", sequence number)` before each collective.

    The number in parentheses counts the elements of its largest argument; a barrier has none.
    Sequence numbers count from 1 over this rank's collectives, of any kind.
    """

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self._note = note
        self.names: list[str] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_collective(func):
            self.names.append(name_of(func))
            self._note(_with_elements(self.names[-1], args), len(self.names))
        return func(*args, **kwargs)


def _with_elements(name: str, args: Sequence[Any]) -> str:
    # A barrier has a tensor too, which says nothing.
    return name if name == "barrier" else f"{name}({_elements(args)})"


def _elements(args: Sequence[Any]) -> int:
    """Count the elements of the largest argument; a list of tensors counts as one."""
    return max((_numel(one) for one in args), default=0)


def _numel(one: Any) -> int:
    if isinstance(one, torch.Tensor):
        return one.numel()
    return sum(_numel(part) for part in one) if isinstance(one, list | tuple) else 0
