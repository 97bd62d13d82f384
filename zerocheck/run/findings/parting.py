"""Variants of a case that tell apart what it cannot: with other numbers of ranks and microbatches.

On 2 ranks with 2 microbatches a gradient that is twice too large may be W, GA, or one of both too
large; with one microbatch nothing is known of the others. A variant has 3 ranks or more, 2
microbatches or more, and no two of these numbers equal. Inner axes keep their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from ...case.fitting import fit
from ...case.schema import Case
from ...case.validity import check
from ...errors import UsageError
from ...machine.hosts import Hosts
from ...protocol.verdicts import Violation
from .bug import Bug, Parted

_OF_ONE_AXIS = ((3,), 5), ((5,), 3)
"""(ranks), microbatches, those tried first that have the most to tell."""

_OF_TWO_AXES = ((2, 3), 5), ((3, 2), 5)
"""((R, S), microbatches) of variants of a case with two axes."""


def parts(bug: Bug) -> bool:
    """Return True if the numbers of a case are part of what the bug may be: a wrong gradient."""
    return bug.violation is not None and bug.violation.obligation == "gradient"


def parted(variant: Case, violation: Violation) -> Parted:
    """Return what a variant says of a bug."""
    count = variant.training.microbatches
    many = "1 microbatch" if count == 1 else f"{count} microbatches"
    return Parted(f"on {variant.world_size} ranks with {many}", violation)


def better(one: Parted | None, other: Parted) -> Parted:
    """Return the one that names causes, the first one if neither or both do."""
    return other if one is None or (other.violation.causes and not one.violation.causes) else one


def distinct(case: Case, *, one_microbatch: bool = False) -> bool:
    """Return True if the numbers of the case tell apart what they multiply or divide.

    one_microbatch: also where there is one only, which tells nothing of their number.
    """
    ranks, count = case.world_size, case.training.microbatches
    axes = [axis.size for axis in case.axes.axes if axis.size > 1]
    apart = (
        ranks > 2
        and (count > 1 or one_microbatch)
        and ranks != count
        and len({*axes, count}) == len(axes) + 1
    )
    return apart and (not case.hosts or case.hosts[0] not in {1, count, *axes})


def variants(case: Case, *, kept: Collection[str] = ()) -> Iterator[Case]:
    """Yield valid variants with distinct numbers; none for a case that is distinct, or resumed.

    kept: paths of fields that stay as they are. The first ones do not clip, since some norms refuse
    more ranks and a gradient is judged before it is clipped. One keeps its number of microbatches:
    what happens to each of them may be too much to see through.
    """
    if distinct(case) or case.resume or "training.microbatches" in kept:
        return
    clip = case.training.clip
    unclipped = clip if "training.clip" in kept else None
    meshes = _OF_TWO_AXES if case.axes.has("replicate") else _OF_ONE_AXIS
    inner = math.prod(case.sharding.inner)
    stages = case.axes.size("pp")
    (first, count), *others = [((*mesh[:-1], mesh[-1] * inner), n * stages) for mesh, n in meshes]
    tries = [
        (first, count, unclipped),
        (first, case.training.microbatches, unclipped),
        (first, count, clip),
        *((mesh, other, unclipped) for mesh, other in others),
    ]
    for mesh, number, norm in dict.fromkeys(tries):
        training = replace(case.training, microbatches=number, clip=norm)
        variant = replace(case, mesh=case.mesh if "mesh" in kept else mesh, training=training)
        if "hosts" not in kept:
            variant = replace(variant, hosts=_hosts(variant))
        variant = fit(variant)
        try:
            check(variant)
        except UsageError:
            continue
        if distinct(variant, one_microbatch=True):
            yield variant


def _hosts(case: Case) -> Hosts:
    """Return several hosts whose number of ranks is no other number of the case; () for none."""
    taken = {*case.axes.sizes, case.training.microbatches}
    return next(((n,) for n in range(2, case.world_size) if n not in taken), ())
