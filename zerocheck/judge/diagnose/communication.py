"""Known causes of unpredicted collectives, each applied to the prediction.

A cause is named only if it gives all that was called in the step: kinds, bytes, dtypes and how many
of each. Their order is not compared, since a cause does not say where in it its calls come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations, product
from math import prod

import msgspec

from ... import causes as bugs
from ...case.schema import Case
from ...case.shapes import Shape, learning, parameter_dtypes, parameter_shapes, trainable
from ...protocol.layout import Call

Sent = Counter[tuple[str, int, str]]
"""How many calls of each kind, bytes and dtype."""

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
COPYING = ("all_gather", "broadcast")
MOVING = (*REDUCING, *COPYING)
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def causes(
    case: Case, calls: Sequence[Call], says: Sequence[Call], *, frozen: Sequence[Call] | None = None
) -> tuple[str, ...]:
    """Find all causes that turn the calls predicted for a step into the observed ones.

    frozen: what was predicted for the step before parameters were unfrozen.
    """
    observed, predicted = _sent(calls), _sent(says)
    if observed == predicted:
        return (bugs.ANOTHER_ORDER,)
    found = dict.fromkeys(name for name, sent in _candidates(case, says) if sent == observed)
    other = _sent_in(observed, predicted)
    if other is not None:
        found[bugs.SENT_IN(dtype=other)] = None
    if frozen is not None and _some_still_frozen(observed, predicted, _sent(frozen)):
        found[bugs.NOT_UNFROZEN] = None
    if _per_parameter(case, calls, says):
        found[bugs.ONE_COLLECTIVE_PER_PARAMETER] = None
    if not found:
        found.update(dict.fromkeys(_surplus(observed, predicted)))
    return tuple(found)


def _some_still_frozen(observed: Sent, predicted: Sent, frozen: Sent) -> bool:
    """Return True if the missing calls are some of those that came with the unfreezing."""
    if observed == frozen:
        return True
    missing = predicted - observed
    return not observed - predicted and bool(missing) and missing <= predicted - frozen


def _sent(calls: Iterable[Call]) -> Sent:
    return Counter((call.kind, call.bytes, call.dtype) for call in calls)


def _candidates(case: Case, says: Sequence[Call]) -> Iterator[tuple[str, Sent]]:
    for kind, other in permutations(MOVING, 2):
        yield bugs.IN_PLACE_OF(other=other, kind=kind), _sent(_replaced(says, kind, other))
    count = case.training.microbatches
    for kinds in (REDUCING, *((kind,) for kind in REDUCING)) if count > 1 else ():
        yield bugs.REDUCED_WITH_EACH_MICROBATCH, _sent(_repeated(says, kinds, count, "backward"))
    words: tuple[tuple[tuple[str, ...], str], ...] = (
        (COPYING, bugs.GATHERED_TWICE),
        (REDUCING, bugs.REDUCED_TWICE),
    )
    for kinds, name in words:
        yield name, _sent(_repeated(says, kinds, 2))
        # What was sent in the step's backward alone, or after it alone.
        for phase in ("forward", "backward", "step"):
            yield name, _sent(_repeated(says, kinds, 2, phase))


def _replaced(says: Sequence[Call], kind: str, other: str) -> Iterator[Call]:
    for call in says:
        yield msgspec.structs.replace(call, kind=other) if call.kind == kind else call


def _repeated(
    says: Sequence[Call], kinds: Sequence[str], times: int, phase: str | None = None
) -> Iterator[Call]:
    for call in says:
        again = call.kind in kinds and phase in (None, call.phase)
        yield from [call] * (times if again else 1)


def _sent_in(observed: Sent, predicted: Sent) -> str | None:
    """Return the dtype of the surplus calls, if as many elements were predicted in others."""
    more, less = observed - predicted, predicted - observed
    dtypes = {dtype for _, _, dtype in more}
    if len(dtypes) != 1 or dtypes & {dtype for _, _, dtype in less}:
        return None
    same = _elements(more) == _elements(less)
    return dtypes.pop() if same else None


def _elements(sent: Sent) -> Counter[tuple[str, float]]:
    """Count the calls of each kind and number of elements."""
    found: Counter[tuple[str, float]] = Counter()
    for (kind, size, dtype), count in sent.items():
        found[kind, size / SIZES.get(dtype, math.nan)] += count
    return found


def _per_parameter(case: Case, calls: Sequence[Call], says: Sequence[Call]) -> bool:
    """Return True if each call, of the kinds with other calls, is of one parameter.

    Calls of whole numbers do not count: what they list of parameters or buckets is as long as these
    are many.
    """
    observed, predicted = (
        Counter({one: count for one, count in _sent(some).items() if one[2] in SIZES})
        for some in (calls, says)
    )
    more, less = observed - predicted, predicted - observed
    sorts = {(kind, dtype) for kind, _, dtype in more}
    if not sorts or any((kind, dtype) not in sorts for kind, _, dtype in less):
        return False
    if more.total() <= less.total():
        return False
    return all(
        any(_multiple(_of(observed, *sort), _of(one, "", sort[1])) for one in _parameters(case))
        for sort in sorts
    )


def _of(sent: Sent, kind: str, dtype: str) -> Counter[int]:
    """Count the calls of each number of bytes, of one kind and dtype."""
    found: Counter[int] = Counter()
    for (name, size, its), count in sent.items():
        if (name, its) == (kind, dtype):
            found[size] += count
    return found


def _multiple(sizes: Counter[int], one: Counter[int]) -> bool:
    if not one or sizes.keys() != one.keys():
        return False
    times = {sizes[key] / one[key] for key in one}
    return len(times) == 1 and times.pop().is_integer()


def _parameters(case: Case) -> Iterator[Sent]:
    """Iterate over the bytes of each trainable parameter, as it is and with usual paddings."""
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    ranks = case.axes.size("shard")

    def padded(elements: int) -> int:
        return -(-elements // ranks) * ranks

    def padded_rows(shape: Shape) -> int:
        return padded(shape[0]) * prod(shape[1:]) if shape else ranks

    ways: tuple[Callable[[Shape], int], ...] = (
        prod,
        lambda shape: padded(prod(shape)),
        padded_rows,
    )
    for names, size in product((trainable(case.model), learning(case)), ways):
        counted: Sent = Counter()
        for name in names:
            dtype = DTYPES[dtypes[name]]
            counted["", size(shapes[name]) * SIZES[dtype], dtype] += 1
        yield counted


def _surplus(observed: Sent, predicted: Sent) -> Iterator[str]:
    more, less = observed - predicted, predicted - observed
    if more and not less:
        yield bugs.CALLED_ONCE_MORE if more.total() == 1 else bugs.FURTHER_COLLECTIVES
    elif less and not more:
        yield bugs.ONE_LEFT_OUT if less.total() == 1 else bugs.COLLECTIVES_LEFT_OUT
    elif _bytes(observed) == _bytes(predicted):
        yield bugs.IN_OTHER_PIECES


def _bytes(sent: Sent) -> Counter[tuple[str, str]]:
    """Sum the bytes of each kind and dtype."""
    total: Counter[tuple[str, str]] = Counter()
    for (kind, size, dtype), count in sent.items():
        total[kind, dtype] += size * count
    return total
