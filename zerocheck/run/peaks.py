"""Peak memory of a step over wrapping, prefetching and bucket sizes: predicted and measured.

Each point is a case that is run on ranks of this machine, as for the obligations of memory. It is
of rank 0, in the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from ..case.schema import Case, Sharding
from ..catalogue import BUCKETED, COMPARED, PREFETCHING
from ..errors import Unsupported, ZerocheckError
from ..protocol.jobs import Measure
from ..protocol.layout import LASTING, Category, Line, Peak, Term
from ..protocol.measurements import Measured
from ..protocol.replies import MemoryReply
from ..ranks.pool import Pool
from .execute.machine import check_machine
from .execute.rank_pool import TARGET
from .execute.rank_replies import expect
from .records.peaks import CASE, Point, Terms

WRAPS: dict[str, Sharding] = {
    "layer": Sharding(wrap="layer"),
    "size 4000": Sharding(wrap="size", bucket=4000),
    "block": Sharding(wrap="block"),
    "whole": Sharding(wrap="whole"),
}
"""Units by the least of their elements, but for `layer`, `block` and `whole`."""
PREFETCHES = (0, 1, 2)
BUCKETS = (2**10, 2**12, 2**14)
"""Elements of a bucket."""


def windows(pool: Pool) -> Iterator[Point]:
    """Measure implementations that prefetch: each wrapping over prefetching."""
    for name in PREFETCHING:
        for wrap, sharding in WRAPS.items():
            for prefetch in PREFETCHES:
                yield _point(pool, name, wrap, prefetch, replace(sharding, prefetch=prefetch))


def buckets(pool: Pool) -> Iterator[Point]:
    """Measure an implementation with buckets over their size."""
    for size in BUCKETS:
        yield _point(pool, BUCKETED, "buckets", size, Sharding(bucket=size))


def stages(pool: Pool, names: Iterable[str] = COMPARED) -> Iterator[Terms]:
    """Measure each implementation, without and with activation checkpointing."""
    again = replace(
        CASE.model, blocks=tuple(replace(block, checkpoint=True) for block in CASE.model.blocks)
    )
    for checkpointed, model in ((False, CASE.model), (True, again)):
        for name in names:
            measurement = measured(pool, name, replace(CASE, model=model))
            lines = [one for one in measurement.lines if one.step == measurement.peaks[-1].step]
            yield Terms(
                name,
                checkpointed,
                sum(one.bytes for one in lines if _is(one, "forward", "activation")),
                sum(one.bytes for one in lines if _is(one, "backward", *LASTING)),
                max(one.total for one in _last(measurement.peaks)),
            )


def measured(pool: Pool, implementation: str, case: Case) -> Measured:
    """Return rank 0's measurements. Raises ZerocheckError if the case cannot be run."""
    job = msgspec.msgpack.encode(Measure(implementation, case))
    result = pool.wait(pool.submit(case.world_size, job))
    try:
        payload = result.payloads[0] if result.payloads else None
        if payload is None:
            raise ZerocheckError(f"{implementation} was not measured: {result}")
        return expect(payload, MemoryReply).measured
    except Unsupported as refusal:
        raise ZerocheckError(f"{implementation} was not measured: {refusal}") from refusal
    finally:
        result.release()


def pool() -> Pool:
    """Start rank processes on this machine."""
    check_machine(CASE.world_size)
    return Pool(TARGET)


def _point(pool: Pool, name: str, curve: str, x: int, sharding: Sharding) -> Point:
    measurement = measured(pool, name, replace(CASE, sharding=sharding))
    last = _last(measurement.peaks)
    highest: dict[Term, int] = {}
    for one in last:
        for term, size in one.highest.items():
            highest[term] = max(highest.get(term, 0), size)
    return Point(name, curve, x, predicted(measurement), max(one.total for one in last), highest)


def predicted(measurement: Measured) -> int:
    """Return the peak of the last step by the layout: lasting bytes, and the most working ones."""
    layout = measurement.layout
    if layout is None or layout.highest is None:
        raise ZerocheckError("no layout says how much is held within a step")
    step = min(measurement.peaks[-1].step, layout.last)
    last = max(line.step for line in layout.lines if line.step <= step)
    lasting = sum(one.bytes for one in layout.lines if _is(one, "backward", *LASTING, step=last))
    return lasting + max(
        one.bytes for one in layout.highest if (one.step, one.term) == (step, "working")
    )


def _is(line: Line, phase: str, *categories: Category, step: int | None = None) -> bool:
    return line.phase == phase and line.category in categories and step in (None, line.step)


def _last(peaks: Sequence[Peak]) -> list[Peak]:
    return [one for one in peaks if one.step == peaks[-1].step]
