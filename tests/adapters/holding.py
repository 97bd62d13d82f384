"""A case that must hold."""

from __future__ import annotations

from collections.abc import Collection

from zerocheck.case.schema import Case
from zerocheck.protocol.verdicts import Judgement, Obligation
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial


def holds(
    pool: Pool, name: str, case: Case, obligations: Collection[Obligation] | None = None
) -> Judgement:
    """Return its judgement; fail unless it holds. obligations: those of such a case by default."""
    outcome = Trial(pool, name, case, obligations=obligations).outcome()
    wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
    assert outcome.status == "holds", (name, case, wrong)
    assert outcome.judgement is not None
    return outcome.judgement
