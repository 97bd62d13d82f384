"""Whether a finding shows again in freshly started rank processes, and how often."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from ..judge.verdict import Obligation
from .findings import Bug
from .trial import Outcome, Ranks, Trial

TRIES = 5
"""Runs in fresh rank processes of a finding that the first of them does not show."""


def confirm(bug: Bug, ranks: Ranks, obligations: Collection[Obligation]) -> None:
    """Run its case again in fresh processes, since those of the run may be dirty.

    Once if that shows it; else TRIES times in all, to count how often. Collectives are traced,
    so that a crash or hang says which one each rank was in.
    """
    while bug.tries < TRIES:
        again = Trial(
            ranks,
            bug.first.implementation,
            bug.first.case,
            fresh=True,
            trace=bug.violation is None,
        ).outcome(obligations=obligations)
        bug.tries += 1
        if _shows(bug, again):
            bug.confirmed += 1
            if bug.violation is None:
                bug.first = replace(bug.first, reason=again.reason, detail=again.detail)
                bug.headline = again.headline
                bug.causes = again.causes or bug.causes
            if bug.tries == 1:
                return
        else:
            bug.otherwise[_in_a_word(again)] += 1


def _shows(bug: Bug, again: Outcome) -> bool:
    """The same crash or hang, or a violation of the same obligation."""
    if again.status != bug.status:
        return False
    if bug.violation is None:
        return True
    violations = () if again.judgement is None else again.judgement.violations
    return any(violation.obligation == bug.violation.obligation for violation in violations)


def _in_a_word(again: Outcome) -> str:
    """`"holds"`, `"crashed"`, `"violated update"`."""
    if again.status == "violated" and again.judgement is not None:
        return f"violated {', '.join(v.obligation for v in again.judgement.violations)}"
    return again.status
