"""Violations that follow from others: of one bug only the source is a finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import causes as bugs
from ...protocol.verdicts import OBLIGATIONS, Judgement, Obligation, Violation

FOLLOWS: dict[Obligation, frozenset[Obligation]] = {
    "gradient": frozenset(("loss",)),
    "buffers": frozenset(("loss",)),
    "publish": frozenset(("gradient", "clip", "update")),
    "loss": frozenset(("publish",)),
    "update": frozenset(("roundtrip",)),
    "continuation": frozenset(("roundtrip",)),
    "release": frozenset(("persistent",)),
    "peak": frozenset(("persistent", "communication")),
}
"""Obligation -> obligations from whose violation one of it can follow: copies differ because the
gradients did, so `publish` maps to `gradient`. An update follows from a checkpoint before the first
step, which changed the state; growth and a peak, from bytes beyond the layout or sent."""


def independent(violations: Sequence[Violation]) -> list[Violation]:
    """Return the violations that do not merely follow from another one, the first step first."""
    ordered = sorted(violations, key=lambda v: (v.step, v.mild, OBLIGATIONS.index(v.obligation)))
    kept: list[Violation] = []
    for number, violation in enumerate(ordered):
        # A loss follows from copies that differ, also where these follow from a gradient.
        if not any(_follows(violation, one) and not one.mild for one in ordered[:number]):
            kept.append(violation)
    return kept


def sources_of(judgement: Judgement, listed: Callable[[Violation], bool]) -> list[Violation]:
    """Return the violations of a case that do not merely follow from another one.

    If the first violation of an obligation is a listed known issue, the further ones count too:
    nothing hides behind a known issue.
    """
    known = {one.obligation for one in judgement.violations if listed(one)}
    further = [one for one in judgement.further if one.obligation in known]
    return independent((*judgement.violations, *further))


def _follows(violation: Violation, source: Violation) -> bool:
    """Return True if the violation can follow from an earlier one, the source."""
    obligations = FOLLOWS.get(violation.obligation, frozenset())
    if violation.obligation == "update" and bugs.RANKS_DISAGREE in violation.causes:
        # Ranks whose gradients are not one and the same overflow each for itself.
        obligations |= {"gradient"}
    never_updated = bugs.NEVER_UPDATED in source.causes and violation.step > source.step
    uncleared = bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT in violation.causes
    wrong = set(violation.tensors) if violation.obligation == "gradient" else set()
    if never_updated and (uncleared or (wrong and wrong <= {*source.tensors})):
        # Who does not have a parameter does not clear its gradient either.
        obligations |= {source.obligation}
    if violation.obligation == "gradient" and bugs.PARAMETERS_OF_THE_PREVIOUS_STEP in source.causes:
        obligations |= {source.obligation}
    return source.obligation in obligations
