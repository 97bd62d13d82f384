"""Confirmation of findings in freshly started rank processes, with counts."""

from __future__ import annotations

import math
from collections.abc import Collection

from msgspec.structs import replace

from ...protocol.verdicts import Obligation, Status, Violation
from ..execute.rank_pool import RankPool
from ..execute.trial import Trial
from ..records.journal import encode
from ..records.records import Outcome
from .bug import Bug

TRIES = 5
"""Runs in fresh rank processes of a finding that the first of them does not show."""

MISSED = 0.01
"""Chance to miss one that shows sometimes, when it is replayed."""

MOST = 30
"""Runs of a replay, at most."""


def runs_to_see(confirmed: int, tries: int) -> int:
    """Return the number of runs that show a failure with a probability of 1 - MISSED.

    It showed in `confirmed` of `tries` runs. Its share s is taken as (confirmed + 1) / (tries + 2),
    Laplace's rule of succession, which is never 0; n runs miss it with the probability (1 - s)^n.
    """
    share = (confirmed + 1) / (tries + 2)
    return min(MOST, math.ceil(math.log(MISSED) / math.log(1 - share)))


def confirm(bug: Bug, ranks: RankPool, obligations: Collection[Obligation]) -> Outcome | None:
    """Run the case of a bug again in fresh processes, since those of the run may be dirty.

    Returns what came of the last run, or None if it has been confirmed before.

    Once if that shows the very same; else TRIES times in all, to count how often. Where only the
    numbers are others it depends on the moment, for what is right or always wrong has the same bits
    in every run. Collectives are traced, so that a crash or hang says which one each rank was in.
    """
    same = False
    again = None
    while bug.tries < TRIES:
        again = Trial(
            ranks,
            bug.first.implementation,
            bug.first.case,
            fresh=True,
            trace=bug.violation is None,
            obligations=obligations,
        ).outcome()
        bug.tries += 1
        if shows(bug, again):
            same = bug.tries == 1 and _same(bug.violation, again)
            bug.confirmed += 1
            if bug.violation is None:
                bug.first = replace(bug.first, reason=again.reason, detail=again.detail)
                bug.headline = again.headline
                bug.causes = again.causes or bug.causes
            if same:
                break
        else:
            bug.otherwise[in_a_word(again)] += 1
    return again


def shows(bug: Bug, again: Outcome) -> bool:
    """Return True for an equal crash or hang, or a violation of the bug's obligation."""
    wanted = () if bug.violation is None else (bug.violation.obligation,)
    return fails_alike(bug.status, wanted, again)


def fails_alike(status: Status, obligations: Collection[Obligation], again: Outcome) -> bool:
    """Return True for an equal status and a violation of one of the obligations, if any."""
    if again.status != status:
        return False
    violations = () if again.judgement is None else again.judgement.violations
    return not obligations or any(one.obligation in obligations for one in violations)


def _same(before: Violation | None, again: Outcome) -> bool:
    """Return True if the violation is repeated, number by number; NaN equals NaN.

    A crash or hang counts as repeated.
    """
    if before is None or again.judgement is None:
        return True
    return encode(before) in [encode(violation) for violation in again.judgement.violations]


def in_a_word(again: Outcome) -> str:
    """Describe an outcome in short: `"holds"`, `"crashed"`, `"violated update"`."""
    if again.status == "violated" and again.judgement is not None:
        return f"violated {', '.join(v.obligation for v in again.judgement.violations)}"
    return again.status
