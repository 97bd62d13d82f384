"""Obligation: each rank holds the predicted bytes, and every byte is attributed to an owner.

There is no tolerance. The layout is exact, padding included, for each rank, category and end of a
phase; a phase that it does not tell of is not compared, and a step that it does not tell of is as
the last one before. Not compared are activations, the samples of the harness, and what only local
variables of a running function hold. Without a layout the ledger must close all the same, and what
is held is bounded by the declared stage and the shards (placement.py); without a stage either, no
share is known, and it is not exercised.

On a GPU the ledger is closed against the caching allocator too, whose rounding is apart, and what
is compared with the layout is what a sharder holds of parameters, gradients, optimizer states and
buffers. What is gathered or reduced is held until its stream is through, which no layout says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ... import causes as bugs
from ...case.schema import Case
from ...case.shapes import learning, parameter_bytes
from ...protocol.layout import CATEGORIES, PHASES, Category, Line, Phase
from ...protocol.measurements import HARNESS, LOCAL, UNEXPLAINED, Measured
from ...protocol.verdicts import Violation, merge_violations
from .. import placement
from ..obligation import Checked, Measurements, ObligationCheck

COMPARED = tuple(one for one in CATEGORIES if one != "activation")
"""Categories that a layout predicts."""
ON_GPU: tuple[Category, ...] = ("parameter", "gradient", "optimizer", "buffer")
"""Those that are compared on a GPU."""

At = tuple[int, Phase]
"""(step, phase)"""

Held = dict[At, dict[Category, Counter[str]]]
"""Bytes by holder, of each category, at the end of each phase."""


def bytes_by_category(lines: Sequence[Line]) -> Held:
    """Return the lines that are compared, in the order of time."""
    held: Held = {}
    for line in lines:
        of = held.setdefault((line.step, line.phase), {})
        if line.category not in COMPARED or line.holder == HARNESS or line.holder.startswith(LOCAL):
            continue
        of.setdefault(line.category, Counter())[line.holder] += line.bytes
    return held


def check(case: Case, measured: Sequence[Measured]) -> Checked:
    """Find the first place where a rank holds other bytes, and all ranks that do so there."""
    held = [bytes_by_category(one.lines) for one in measured]
    violation = _unexplained(held) or _not_closed(measured)
    if any(one.layout is not None and one.layout.lines for one in measured):
        violation = violation or _first(case, held, [_Expected(one) for one in measured])
        return Checked(violation=violation, exercised=any(held), vacuous=case.world_size == 1)
    return Checked(
        violation=violation or placement.check(case, measured),
        exercised=any(held) and placement.declared(case, measured),
        vacuous=not placement.bounds(case, measured),
    )


def _unexplained(held: Sequence[Held]) -> Violation | None:
    for at in held[0]:
        counts = {
            rank: sum(
                count
                for holders in one.get(at, {}).values()
                for holder, count in holders.items()
                if holder.startswith(UNEXPLAINED)
            )
            for rank, one in enumerate(held)
        }
        ranks = [rank for rank, count in counts.items() if count]
        if ranks:
            first = ranks[0]
            return Violation(
                obligation="persistent",
                step=at[0],
                role=UNEXPLAINED,
                tensors=(),
                ranks=tuple(ranks),
                observed=float(counts[first]),
                expected=0.0,
                bound=0.0,
                explanation=(
                    f"the allocator counts {counts[first]:,} bytes on rank {first} {words(at)} "
                    "that nobody holds"
                ),
                causes=(bugs.THE_LEDGER_DOES_NOT_CLOSE,),
            )
    return None


def _not_closed(measured: Sequence[Measured]) -> Violation | None:
    """Find a place where a GPU allocator's counter differs from its history and rounding."""
    for number in range(len(measured[0].pools)):
        pools = [one.pools[number] for one in measured]
        ranks = [rank for rank, pool in enumerate(pools) if pool.unexplained]
        if ranks:
            pool = pools[ranks[0]]
            return Violation(
                obligation="persistent",
                step=pool.step,
                role=UNEXPLAINED,
                tensors=(),
                ranks=tuple(ranks),
                observed=float(pool.allocated),
                expected=float(pool.asked + pool.rounding),
                bound=0.0,
                explanation=(
                    f"torch.cuda.memory_allocated is {pool.allocated:,} on rank {ranks[0]} "
                    f"{words((pool.step, pool.phase))}; what was asked for is {pool.asked:,}, and "
                    f"{pool.rounding:,} were added to round it up"
                ),
                causes=(bugs.THE_LEDGER_DOES_NOT_CLOSE,),
            )
    return None


class _Expected:
    """Prediction of one rank's layout for any phase."""

    def __init__(self, measured: Measured) -> None:
        self.compared = ON_GPU if measured.on_gpu else COMPARED
        self._predicted: dict[Phase, dict[int, Counter[Category]]] = {phase: {} for phase in PHASES}
        for line in measured.layout.lines if measured.layout is not None else ():
            steps = self._predicted[line.phase].setdefault(line.step, Counter())
            steps[line.category] += line.bytes

    def at(self, at: At) -> Counter[Category] | None:
        """Return bytes by category, or None where they are not predicted."""
        step, phase = at
        predicted = [one for one in self._predicted[phase] if one <= step]
        return self._predicted[phase][max(predicted)] if predicted else None


def _first(case: Case, held: Sequence[Held], expected: Sequence[_Expected]) -> Violation | None:
    """Return the first place of each category and cause."""
    found: dict[tuple[object, ...], Violation] = {}
    for at in held[0]:
        predicted = [one.at(at) for one in expected]
        for category in expected[0].compared:
            wrong = [
                rank
                for rank, says in enumerate(predicted)
                if says is not None
                and at in held[rank]
                and held[rank][at].get(category, Counter()).total() != says[category]
            ]
            if wrong:
                one = _violation(case, held, predicted, at, category, wrong, expected[wrong[0]])
                found.setdefault((category, one.causes), one)
    return merge_violations(list(found.values()))


def _violation(
    case: Case,
    held: Sequence[Held],
    predicted: Sequence[Counter[Category] | None],
    at: At,
    category: Category,
    wrong: Sequence[int],
    layout: _Expected,
) -> Violation:
    rank = wrong[0]
    holders = held[rank][at].get(category, Counter())
    says = predicted[rank]
    assert says is not None
    observed, expected = holders.total(), says[category]
    names = tuple(name for name, _ in holders.most_common() if name)
    difference = abs(observed - expected)
    by = f", held by {', '.join(names[:3])}" if names and observed > expected else ""
    return Violation(
        obligation="persistent",
        step=at[0],
        role=category,
        tensors=names,
        ranks=tuple(wrong),
        observed=float(observed),
        expected=float(expected),
        bound=0.0,
        explanation=(
            f"{words(at)} rank {rank} holds {observed:,} bytes of {category}, "
            f"{difference:,} {'more' if observed > expected else 'less'} than the "
            f"{expected:,} of its layout{by}"
        ),
        causes=tuple(_causes(case, at, category, observed, layout)),
    )


def words(at: At) -> str:
    """Describe the end of a phase in words."""
    step, phase = at
    if phase == "built":
        return "after it was built"
    if phase == "closed":
        return "after close()"
    return f"after the {phase} of step {step}"


def _causes(
    case: Case, at: At, category: Category, observed: int, layout: _Expected
) -> Iterator[str]:
    """Iterate over the causes that account for the bytes.

    By the sizes of unsharded training, and by the layout of the step before parameters are
    unfrozen.
    """
    says = layout.at(at)
    assert says is not None
    expected = says[category]
    unfreeze = case.training.unfreeze
    if unfreeze is not None and unfreeze <= at[0]:
        # Optimizer states are there from the end of the first step on, in every phase.
        frozen = [layout.at((unfreeze - 1, phase)) for phase in (at[1], "step")]
        if any(one is not None and one[category] == observed for one in frozen):
            yield bugs.NOT_UNFROZEN
            return
    sizes = parameter_bytes(case.model)
    learns = sum(sizes[name] for name in learning(case))
    surplus = observed - expected
    if surplus < 0:
        yield bugs.HELD_BY_NOBODY
        return
    if category == "optimizer" and expected < placement.state_bytes(case) <= observed:
        yield bugs.OPTIMIZER_STATE_REPLICATED
    if category == "gradient" and surplus >= learns > 0:
        yield bugs.WHOLE_GRADIENTS_KEPT
    if category in ("parameter", "gathered") and 0 < surplus <= sum(sizes.values()) * 2:
        yield bugs.GATHERED_PARAMETERS_KEPT
    if observed == 2 * expected > 0:
        yield bugs.HELD_TWICE


def _check_case(measurements: Measurements) -> Iterator[Checked]:
    yield check(measurements.case, measurements.ranks)


PERSISTENT = ObligationCheck("persistent", _check_case)
