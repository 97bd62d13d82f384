"""Kinds of tensors and ranks by which an entry of known issues is limited.

All of them follow from the case alone. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase

from ...case.schema import Case
from ...case.shapes import (
    frozen_names,
    learning,
    matching,
    parameter_bytes,
    parameter_shapes,
    sometimes_used,
    transposed,
    uncalled,
    unfrozen,
)
from ...errors import unknown

Names = Callable[[Case], Collection[str]]

TENSORS: dict[str, Names] = {
    "transposed": lambda case: transposed(case.model),
    "frozen": lambda case: frozen_names(case.model),
    "unfrozen": unfrozen,
    "unused": lambda case: _starting(case, uncalled(case.model)),
    "sometimes-used": lambda case: _starting(case, sometimes_used(case.model)),
    "one-element": lambda case: [
        name for name, shape in parameter_shapes(case.model).items() if math.prod(shape) == 1
    ],
}
"""Kinds of parameters -> their names in a case."""

RANKS: dict[str, Callable[[Case], tuple[int, ...]]] = {
    "without-elements": lambda case: ranks_without_elements(case)
}
"""Kinds of ranks -> their numbers."""

ALIGNMENT = 2
"""`nccl_start_alignment_factor` of DeepSpeed: a flat buffer has a multiple of it, times W."""


def check_kinds(tensors: Iterable[str], ranks: str) -> None:
    """Raise UsageError for an unknown kind. A name with a dot or a star is a pattern."""
    for kind in tensors:
        if kind not in TENSORS and not _is_pattern(kind):
            raise unknown("kind of tensors", kind, tuple(TENSORS))
    if ranks and ranks not in RANKS:
        raise unknown("kind of ranks", ranks, tuple(RANKS))


def is_of(kinds: Iterable[str], case: Case, tensor: str) -> bool:
    """Return True if a tensor is of one of the kinds, or its name matches one of the patterns."""
    return any(
        fnmatchcase(tensor, kind) if _is_pattern(kind) else tensor in TENSORS[kind](case)
        for kind in kinds
    )


def ranks_of(kind: str, case: Case) -> tuple[int, ...]:
    """Return the ranks of a kind."""
    return RANKS[kind](case)


def most_bytes(kinds: Iterable[str], case: Case) -> int:
    """Return the bytes of all parameters of these kinds.

    Each is padded to a multiple of the world size.
    """
    kinds = tuple(kinds)
    sizes = parameter_bytes(case.model)
    return sum(
        size + 4 * (case.world_size - 1) for name, size in sizes.items() if is_of(kinds, case, name)
    )


def ranks_without_elements(case: Case) -> tuple[int, ...]:
    """Return the ranks that hold nothing but padding of a parameter group.

    It is sharded as in DeepSpeed's stages 1 and 2: the flat buffer of the group is padded and
    divided equally.
    """
    shapes, left = parameter_shapes(case.model), learning(case)
    world = case.world_size
    empty: set[int] = set()
    for group in case.optimizer.groups:
        names = matching(left, (group.pattern,))
        left = tuple(name for name in left if name not in names)
        count = sum(math.prod(shapes[name]) for name in names)
        share = -(-count // (ALIGNMENT * world)) * ALIGNMENT
        empty |= {rank for rank in range(world) if rank * share >= count}
    return tuple(sorted(empty))


def _is_pattern(kind: str) -> bool:
    return "." in kind or "*" in kind


def _starting(case: Case, prefixes: Iterable[str]) -> list[str]:
    starts = tuple(prefixes)
    return [name for name in parameter_shapes(case.model) if name.startswith(starts)]
