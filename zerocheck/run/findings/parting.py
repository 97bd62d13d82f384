"""Variants of a smallest case that tell apart what it cannot: with other numbers of the case.

On 2 ranks with 2 microbatches a gradient that is twice too large may be W, GA, or one of both too
large; with one microbatch nothing is known of the others. A variant has 3 ranks or more, 2
microbatches or more, and no two of these numbers equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from ...case.fitting import fit
from ...case.schema import Case
from ...case.validity import check
from ...errors import UsageError

_NUMBERS = ((3, 4), (5, 3), (3, 2))
"""(ranks, microbatches), those tried first that have the most to tell."""

_OF_TWO_AXES = ((2, 3), 4), ((3, 2), 4)
"""((R, S), microbatches) of variants of a case with two axes."""


def distinct(case: Case) -> bool:
    """Return True if the numbers of the case tell apart what they multiply or divide."""
    ranks, count = case.world_size, case.training.microbatches
    axes = [size for size in case.mesh if size > 1]
    return ranks > 2 and count > 1 and ranks != count and len({*axes, count}) == len(axes) + 1


def variants(case: Case, *, kept: Collection[str] = ()) -> Iterator[Case]:
    """Yield valid variants with distinct numbers; none for a case that is distinct, or resumed.

    kept: paths of fields that stay as they are.
    """
    if distinct(case) or case.resume or "training.microbatches" in kept:
        return
    two_axes = case.axes.has("replicate")
    for mesh, count in _OF_TWO_AXES if two_axes else [((n,), count) for n, count in _NUMBERS]:
        training = replace(case.training, microbatches=count)
        variant = replace(case, mesh=case.mesh if "mesh" in kept else mesh, training=training)
        if "hosts" not in kept:
            variant = replace(variant, hosts=())
        variant = fit(variant)
        try:
            check(variant)
        except UsageError:
            continue
        if distinct(variant):
            yield variant
