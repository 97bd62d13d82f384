"""What the pace of a case betrays, in words: only where a limit follows from what the case asks.

Whether collectives are slow, or a rank is waited for too long, has no limit that could be derived:
machines differ. Reports show those figures in their order, and no verdict.
"""

from __future__ import annotations

from math import prod

from ..case.schema import Case
from ..case.shapes import learning, parameter_dtypes, parameter_shapes
from .pace import ITEMSIZE, REDUCING, Pace


def patterns(case: Case, pace: Pace) -> tuple[str, ...]:
    """One sentence for each pattern that the case shows."""
    if case.world_size == 1 or not pace.steps:
        return ()
    found = (_one_by_one(case, pace), _whole_bucket(case, pace), _whole_gather(case, pace))
    return tuple(sentence for sentence in found if sentence is not None)


def _one_by_one(case: Case, pace: Pace) -> str | None:
    """Every trained tensor is reduced alone, where the case allows fewer collectives.

    Units of one layer each, the finest `sharding.wrap`, are as many as there are modules with
    parameters. Buckets that are filled in order until the next tensor does not fit are at most
    2 E / b + 1 for E elements and buckets of b, since two neighbours hold more than b together; and
    one more for each dtype. So more tensors than both are more collectives than any setting asks
    for.
    """
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    names = [name for name in learning(case) if prod(shapes[name])]
    layers = len({name.rpartition(".")[0] for name in names})
    elements = sum(prod(shapes[name]) for name in names)
    buckets = 2 * elements / case.sharding.bucket + len({dtypes[name] for name in names})
    if pace.alone < len(names) or len(names) <= max(layers, buckets):
        return None
    reducing = [kind for kind in pace.kinds if kind.kind in REDUCING]
    most = max(reducing, key=lambda kind: kind.calls)
    return (
        "too many small collectives: one reduction for each parameter tensor: "
        f"{most.calls:g} of a median of {most.bytes:,.0f} bytes in a step, for {layers} layers"
    )


def _whole_bucket(case: Case, pace: Pace) -> str | None:
    """A reduction is larger than any bucket that the case asks for, by code that obeys `bucket`.

    A bucket that is closed once it holds b elements has fewer than b and the largest tensor, and
    over W ranks it is padded by less than W. With `wrap` the buckets are units, of any size.
    """
    if "bucket" not in pace.obeys or "wrap" in pace.obeys:
        return None
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    sizes = {name: prod(shapes[name]) for name in learning(case)}
    itemsize = max((ITEMSIZE[dtypes[name]] for name in sizes), default=4)
    # Each tensor of a bucket may be padded for itself.
    limit = case.sharding.bucket + max(sizes.values(), default=0) + case.world_size * len(sizes)
    largest = max((kind.largest for kind in pace.kinds if kind.kind in REDUCING), default=0)
    if largest <= itemsize * limit:
        return None
    whole = sum(sizes[name] * ITEMSIZE[dtypes[name]] for name in sizes)
    return (
        f"a bucket that spikes memory: one reduction of {largest:,} bytes, {largest / whole:.0%} "
        f"of all gradients, where buckets of {case.sharding.bucket:,} elements are asked for"
    )


def _whole_gather(case: Case, pace: Pace) -> str | None:
    """All parameters are gathered at once, by code that obeys `wrap`, where units are asked for.

    The stem and the head are in no block, so a unit of a block or a layer is never all there is
    where a block has parameters. A unit by size may be, so nothing is said of those.
    """
    asked = case.sharding.wrap
    if "wrap" not in pace.obeys or asked not in ("block", "layer"):
        return None
    if case.model.user is not None:  # its units are its own
        return None
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    if not any(prod(shapes[name]) for name in shapes if name.startswith("blocks.")):
        return None
    whole = sum(prod(shapes[name]) * ITEMSIZE[dtypes[name]] for name in shapes)
    largest = max((kind.largest for kind in pace.kinds if kind.kind == "all_gather"), default=0)
    if largest < whole:
        return None
    return (
        f"a wrapping that gathers too much: one all-gather of {largest:,} bytes holds the whole "
        f"model, where units of one {asked} are asked for"
    )
