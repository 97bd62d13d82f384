"""Text of coverage: pairs of features, those not exercised and why, and vacuous obligations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..case.features import FEATURES
from ..foreign_text import one_line
from ..protocol.verdicts import OBLIGATION_SETS, VACUOUS
from ..run.records.coverage import FEW, CoveredPairs, some
from ..run.records.tally import ImplementationTally, Tally

PAIRS_SHOWN = 200
"""Left-out pairs that the JSON report names; their number is next to them."""


def coverage_lines(counted: Tally) -> list[str]:
    """Return the lines on coverage for the end of a run; none for a run that promised none."""
    lines = []
    for name, implementation in counted.implementations.items():
        line = implementation.covered.line(name)
        if line:
            lines += [one_line(line), *vacuous_lines(implementation)]
    return lines


def not_exercised(counted: Tally) -> str:
    """Return what a run says nothing of, for its last line; empty if there is nothing.

    That are obligations that were not asked for or could fail in no case, and features of which
    there was no case, or none in which they could break anything. A run of random cases says
    nothing of pairs of features: some meet in none of its cases.
    """
    if counted.started is not None and counted.started.shard:
        return "not exercised: what the other shards take"
    left = unexercised(counted)
    promised = any(one.covered.counted for one in counted.implementations.values())
    partly = f"{left.partly} feature{'s' if left.partly > 1 else ''}"
    parts = [
        f"{some(names)}{why}"
        for names, why in (
            (left.idle, " (could not fail)"),
            (left.unasked, " (not asked for)"),
            (left.nowhere, ""),
            (_weights(counted), " (all samples of --model weigh the same)"),
            ([partly] if left.partly else [], " not by every implementation"),
            ([] if promised else ["all pairs of features"], " (--profile ci)"),
            (_sizes(counted), ""),
        )
        if names
    ]
    return f"not exercised: {'; '.join(parts)}" if parts else ""


def _sizes(counted: Tally) -> list[str]:
    """Return beyond which sizes no case went: what goes wrong there is not seen."""
    steps = max((one.steps for one in counted.implementations.values()), default=0)
    elements = max((one.elements for one in counted.implementations.values()), default=0)
    return [f"more than {steps} steps", f"more than {elements:,} elements a tensor"] * (steps > 0)


def _weights(counted: Tally) -> list[str]:
    """Return the declared weights of losses that no sample of the user's own model can test."""
    own = counted.started is not None and counted.started.model
    declared = {one.semantics.get("weight") for one in counted.implementations.values()}
    return ["weight='token'"] if own and "token" in declared else []


@dataclass(frozen=True)
class Unexercised:
    """Obligations and features that a run says nothing of.

    idle: obligations that could fail in no case; unasked: sets of obligations; nowhere: features
    that no implementation exercised; partly: number of those that only some exercised.
    """

    idle: list[str]
    unasked: list[str]
    nowhere: list[str]
    partly: int


def unexercised(counted: Tally) -> Unexercised:
    """Return what no case exercised, of any implementation, and others could have."""
    implementations = counted.implementations.values()
    exercised = {name for one in implementations for name in one.covered.exercised}
    missed = list(dict.fromkeys(name for one in implementations for name in one.covered.not_drawn))
    nowhere = [name for name in missed if name not in exercised]
    return Unexercised(
        idle=_idle(counted),
        unasked=[n for n, of in OBLIGATION_SETS.items() if not {*of} & {*counted.obligations}],
        nowhere=nowhere,
        partly=len(missed) - len(nowhere),
    )


def _idle(counted: Tally) -> list[str]:
    """Return obligations that could fail in no case, with the implementations if not for all."""
    every = counted.implementations
    found = []
    for obligation in counted.obligations:
        of = [
            name
            for name, one in every.items()
            if not one.cells[obligation].informative and obligation not in one.without
        ]
        if of:
            found.append(obligation if len(of) == len(every) else f"{obligation} of {some(of, 2)}")
    return found


def vacuous_lines(implementation: ImplementationTally) -> list[str]:
    """Return one line for each obligation that holds and could hardly have failed."""
    return [
        one_line(
            f"{implementation.name}: {obligation} could have failed in "
            f"{cell.informative or 'none'} of {cell.checked} cases; "
            f"in the others {VACUOUS[obligation]}"
        )
        for obligation, cell in implementation.hardly_checked.items()
        if cell.vacuous
    ]


def pairs_cell(covered: CoveredPairs) -> str:
    """Format pairs as `3,410 of 3,410`, or a dash where none were wanted."""
    if not covered.counted:
        return "–"
    return f"{covered.covered_count:,} of {covered.supported_count:,}"


def feature_rows(counted: Tally) -> list[list[str]]:
    """Return rows per feature: name, title, and each implementation's judged cases.

    Where there are none, the reason.
    """
    some = [implementation.covered for implementation in counted.implementations.values()]
    missing = [covered.not_exercised for covered in some]
    shown = {name for covered in some for name in covered.names}
    return [
        [name, feature.title]
        + [
            str(covered.exercised[name])
            if covered.exercised[name]
            else _short(reasons.get(name, "not drawn"))
            for covered, reasons in zip(some, missing, strict=True)
        ]
        for name, feature in FEATURES.items()
        if name in shown
    ]


def _short(reason: str) -> str:
    """Shorten the reason of a refusal; whole reasons are in a table of their own."""
    return {"ignored by it": "ignored"}.get(reason, reason.partition(":")[0])


def refused_rows(counted: Tally) -> Iterable[list[str]]:
    """Return rows of implementation, refused pairs or features, and the reason."""
    for name, implementation in counted.implementations.items():
        covered = implementation.covered
        features = [
            (feature, reason.removeprefix("refused: "))
            for feature, reason in covered.not_exercised.items()
            if reason.startswith("refused: ")
        ]
        for reason, pairs in covered.refused.items():
            whole = [feature for feature, why in features if why == reason]
            yield [name, f"{pairs.bit_count():,}", ", ".join(whole), reason]


def vacuous_rows(counted: Tally) -> Iterable[list[str]]:
    """Yield rows of implementation, obligation, vacuous cases of all that hold, and reason."""
    for name, implementation in counted.implementations.items():
        for obligation, cell in implementation.cells.items():
            if cell.vacuous:
                share = f"{cell.vacuous} of {cell.checked}"
                yield [name, obligation, share, VACUOUS[obligation]]


def as_data(implementation: ImplementationTally) -> dict[str, Any]:
    """Coverage of one implementation for the JSON report."""
    covered = implementation.covered
    left_out = covered.left_out_pairs
    return {
        "world_sizes": {
            str(size): count for size, count in sorted(implementation.world_sizes.items())
        },
        "features": dict(covered.exercised),
        "not_exercised": covered.not_exercised,
        "seldom_exercised": covered.seldom_exercised,
        "ignored": [name for name in FEATURES if name in covered.ignored],
        "pairs": {
            "supported": covered.supported_count,
            "covered": covered.covered_count,
            "refused": {reason: pairs.bit_count() for reason, pairs in covered.refused.items()},
            "left_out": len(left_out),
            "left_out_first": left_out[:PAIRS_SHOWN],
        }
        if covered.counted
        else None,
        "vacuous": {
            obligation: cell.vacuous
            for obligation, cell in implementation.cells.items()
            if cell.vacuous
        },
        "could_fail_in_few": {
            obligation: cell.informative
            for obligation, cell in implementation.hardly_checked.items()
        },
        "few": FEW,
    }
