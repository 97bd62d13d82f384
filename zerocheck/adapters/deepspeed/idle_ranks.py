"""Ranks without elements of a parameter group, for the scope of known issues. Imports no torch."""

from __future__ import annotations

import math

from ...case.schema import Case
from ...case.shapes import learning, matching, parameter_shapes

ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a flat buffer has a multiple of it, times W, of elements."""


def ranks_without_elements(case: Case) -> tuple[int, ...]:
    """Return the ranks that hold nothing but padding of a parameter group.

    In stages 1 and 2 the flat buffer of the group is padded and divided equally.
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
