"""Obligation: at no instant of a step a rank holds more than its layout predicts.

There is no tolerance. The layout says, for each phase, the most bytes of what is gathered at once,
of buckets at once, and of all that is held beyond parameters, optimizer states and buffers: at any
instant (`working`), and right after memory was allocated to gather or to reduce, since more would
not show there where activations are the most. It follows from the rules of the sharder, in the
order in which one device comes to the units: what is gathered ahead, when it is let go of, when
gradients are reduced. What the model itself needs, activations and operators' own memory, is taken
from a pass of one device with the same allocator, since it does not depend on the sharder. So each
figure is exact where it is predicted, and holding less is no violation.

A thread of a backend may let go of a tensor late, which is no fault of the sharder and shows
sometimes. So the steps that are alike are judged together: what is exceeded is exceeded in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...case.measurement import settled
from ...case.schema import Case
from ...protocol.layout import Highest, Peak, Phase, Term
from ...protocol.measurements import Measured
from ...protocol.verdicts import Violation
from ..diagnose.peak import causes
from ..obligation import Checked, Measurements, ObligationCheck

ORDER: tuple[Term, ...] = ("gathered", "bucket", "reducing", "gathering", "working")
"""What is blamed first: the last ones are sums of all."""

WORDS: dict[str, str] = {
    "gathered": "gathered parameters",
    "bucket": "buckets",
    "reducing": "working memory",
    "gathering": "working memory",
    "working": "working memory",
}


class _Excess(NamedTuple):
    """Excess of one rank: the least of all steps that are alike, at the first of them."""

    step: int
    phase: Phase
    term: Term
    observed: int
    expected: int


def check(case: Case, measured: Sequence[Measured]) -> Checked:
    """Find the first term that exceeds its prediction, and all ranks on which it does."""
    predicted = [_predicted(one) for one in measured]
    found = [_first(case, one, says) for one, says in zip(measured, predicted, strict=True)]
    exceeded = [one for one in found if one is not None]
    violation = None
    if exceeded:
        first = min(exceeded, key=lambda one: ORDER.index(one.term))
        ranks = tuple(
            rank
            for rank, one in enumerate(found)
            if one is not None and (one.phase, one.term) == (first.phase, first.term)
        )
        violation = _violation(case, measured[ranks[0]], first, ranks)
    return Checked(
        violation=violation,
        exercised=any(one.peaks for one in measured),
        vacuous=_vacuous(case, predicted),
    )


def _vacuous(case: Case, predicted: Sequence[dict[tuple[int, Phase], list[Highest]]]) -> bool:
    return case.world_size == 1 or not any(predicted)


def _predicted(measured: Measured) -> dict[tuple[int, Phase], list[Highest]]:
    """Return the predicted maxima of each phase; steps after the last predicted one repeat it."""
    layout = measured.layout
    found: dict[tuple[int, Phase], list[Highest]] = {}
    for one in layout.highest or () if layout is not None else ():
        found.setdefault((one.step, one.phase), []).append(one)
    last = layout.last if layout is not None else -1
    for peak in measured.peaks:
        if peak.step > last and (last, peak.phase) in found:
            found[peak.step, peak.phase] = found[last, peak.phase]
    return found


def _first(
    case: Case, measured: Measured, predicted: dict[tuple[int, Phase], list[Highest]]
) -> _Excess | None:
    alike = [peak for peak in measured.peaks if peak.step > settled(case)]
    for term in ORDER:
        for phase in dict.fromkeys(peak.phase for peak in alike):
            peaks = [peak for peak in alike if peak.phase == phase]
            found = [_excess(peak, term, predicted.get((peak.step, phase), [])) for peak in peaks]
            least = [one for one in found if one is not None]
            if least and len(least) == len(peaks):
                return min(least, key=lambda one: one.observed - one.expected)
    return None


def _excess(peak: Peak, term: Term, predicted: Sequence[Highest]) -> _Excess | None:
    for one in predicted:
        observed = peak.highest.get(term, 0)
        if one.term == term and observed > one.bytes:
            return _Excess(peak.step, peak.phase, term, observed, one.bytes)
    return None


def _violation(
    case: Case, measured: Measured, excess: _Excess, ranks: tuple[int, ...]
) -> Violation:
    observed, expected = excess.observed, excess.expected
    return Violation(
        obligation="peak",
        step=excess.step,
        role=excess.term,
        tensors=(),
        ranks=ranks,
        observed=float(observed),
        expected=float(expected),
        bound=0.0,
        explanation=(
            f"in the {excess.phase} of step {excess.step} rank {ranks[0]} holds {observed:,} bytes "
            f"of {WORDS[excess.term]} at once, {observed - expected:,} more than the "
            f"{expected:,} of its layout{_split(measured, excess)}"
        ),
        causes=tuple(causes(case, measured, excess.term, excess.phase, observed, expected)),
    )


def _split(measured: Measured, excess: _Excess) -> str:
    """Describe the components of the phase's peak."""
    place = excess.step, excess.phase
    peak = next(one for one in measured.peaks if (one.step, one.phase) == place)
    return f"; its peak is {', '.join(_terms(peak))}" if peak.bytes else ""


def _terms(peak: Peak) -> Iterator[str]:
    for category, size in sorted(peak.bytes.items(), key=lambda pair: -pair[1]):
        yield f"{category} {size:,}"


def _check_case(measurements: Measurements) -> Iterator[Checked]:
    yield check(measurements.case, measurements.ranks)


PEAK = ObligationCheck("peak", _check_case)
