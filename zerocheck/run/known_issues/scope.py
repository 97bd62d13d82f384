"""Kinds of tensors and ranks by which an entry of known issues is limited.

All of them follow from the case alone. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from importlib import import_module

from ...case.schema import Case
from ...case.shapes import (
    frozen_names,
    parameter_bytes,
    parameter_shapes,
    sometimes_used,
    transposed,
    uncalled,
    unfrozen,
)
from ...catalogue import RANK_KINDS
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


def check_kinds(tensors: Iterable[str], ranks: str) -> None:
    """Raise UsageError for an unknown kind. A name with a dot or a star is a pattern."""
    for kind in tensors:
        if kind not in TENSORS and not _is_pattern(kind):
            raise unknown("kind of tensors", kind, tuple(TENSORS))
    if ranks and ranks not in RANK_KINDS:
        raise unknown("kind of ranks", ranks, tuple(RANK_KINDS))


def is_of(kinds: Iterable[str], case: Case, tensor: str) -> bool:
    """Return True if a tensor is of one of the kinds, or its name matches one of the patterns."""
    return any(
        fnmatchcase(tensor, kind) if _is_pattern(kind) else tensor in TENSORS[kind](case)
        for kind in kinds
    )


def ranks_of(kind: str, case: Case) -> tuple[int, ...]:
    """Return the ranks of a kind."""
    module, _, name = RANK_KINDS[kind].partition(":")
    found: tuple[int, ...] = getattr(import_module(module), name)(case)
    return found


def most_bytes(kinds: Iterable[str], case: Case) -> int:
    """Return the bytes of all parameters of these kinds.

    Each is padded to a multiple of the world size.
    """
    kinds = tuple(kinds)
    sizes = parameter_bytes(case.model)
    return sum(
        size + 4 * (case.world_size - 1) for name, size in sizes.items() if is_of(kinds, case, name)
    )


def _is_pattern(kind: str) -> bool:
    return "." in kind or "*" in kind


def _starting(case: Case, prefixes: Iterable[str]) -> list[str]:
    starts = tuple(prefixes)
    return [name for name in parameter_shapes(case.model) if name.startswith(starts)]
