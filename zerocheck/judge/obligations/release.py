"""Obligation: nothing grows from step to step, and nothing remains after close().

The first step, and one that unfreezes parameters, make what the optimizer keeps; so the steps after
that are compared, each with the one before, at the end of the same phase: the sum over categories,
since what moves from one to another is no more than before. (DDP with static_graph builds its
buckets anew after a few steps; then the gradient of a parameter that is never used is no view of
them any more.) Gradients and optimizer states are left out of that where some batches use other
parameters than others, and then buckets too, if gradients are views of them; activations always,
since routing is by the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ... import causes as bugs
from ...case.measurement import settled
from ...case.schema import Case
from ...case.shapes import sometimes_used
from ...protocol.layout import CATEGORIES, Category
from ...protocol.measurements import Measured
from ...protocol.verdicts import Violation, merge_violations
from ..obligation import Checked, Measurements, ObligationCheck
from .persistent import At, Held, bytes_by_category, words

BY_DATA: tuple[Category, ...] = ("gradient", "optimizer")
"""What depends on the batch, where parameters are used sometimes."""


def check(case: Case, measured: Sequence[Measured]) -> Checked:
    """Find the first growth, or the bytes left in the end."""
    held = [bytes_by_category(one.lines) for one in measured]
    found = (_growth(case, held), _left(held))
    return Checked(
        violation=merge_violations([one for one in found if one is not None]), exercised=any(held)
    )


def _growth(case: Case, held: Sequence[Held]) -> Violation | None:
    omitted: tuple[Category, ...] = ("activation",)
    if sometimes_used(case.model):
        views: tuple[Category, ...] = ("bucket",) if case.sharding.bucket_view else ()
        omitted = (*omitted, *BY_DATA, *views)
    first = settled(case) + 1
    for at in held[0]:
        step, phase = at
        if phase not in ("forward", "backward", "step") or step <= first:
            continue
        before: At = (step - 1, phase)
        growths = [
            {c: _bytes(one, at, c) - _bytes(one, before, c) for c in CATEGORIES if c not in omitted}
            for one in held
        ]
        grown = [rank for rank, growth in enumerate(growths) if sum(growth.values()) > 0]
        if grown:
            rank = grown[0]
            category = max(growths[rank], key=growths[rank].__getitem__)
            now, was = (_bytes(held[rank], one, category) for one in (at, before))
            text = (
                f"{words(at)} rank {rank} holds {now:,} bytes of {category}, "
                f"{now - was:,} more than a step before"
            )
            names = held[rank][at].get(category, Counter())
            return _violation(at, category, grown, now, was, text, "grows", names)
    return None


def _left(held: Sequence[Held]) -> Violation | None:
    """Return the bytes left of each category after close()."""
    found: list[Violation] = []
    for at in {at: None for one in held for at in one if at[1] == "closed"}:
        for category in CATEGORIES:
            alive = [rank for rank, one in enumerate(held) if _bytes(one, at, category)]
            if alive:
                rank = alive[0]
                count = _bytes(held[rank], at, category)
                text = f"after close() rank {rank} still holds {count:,} bytes of {category}"
                names = sum((held[r][at].get(category, Counter()) for r in alive), Counter())
                found.append(
                    _violation(at, category, alive, count, 0, text, bugs.ALIVE_AFTER_CLOSE, names)
                )
    return merge_violations(found)


def _bytes(held: Held, at: At, category: Category) -> int:
    return held.get(at, {}).get(category, Counter()).total()


def _violation(
    at: At,
    category: Category,
    ranks: Sequence[int],
    observed: int,
    expected: int,
    text: str,
    cause: str,
    holders: Counter[str],
) -> Violation:
    return Violation(
        obligation="release",
        step=at[0],
        role=category,
        tensors=tuple(name for name, _ in holders.most_common() if name),
        ranks=tuple(ranks),
        observed=float(observed),
        expected=float(expected),
        bound=0.0,
        explanation=text,
        causes=(cause,),
    )


def _check_case(measurements: Measurements) -> Iterator[Checked]:
    yield check(measurements.case, measurements.ranks)


RELEASE = ObligationCheck("release", _check_case)
