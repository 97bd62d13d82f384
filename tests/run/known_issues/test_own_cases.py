"""The case of an entry shows it, where what it shows is drawn from its seed.

Every run shows the case of each entry of its implementations, and calls one stale that does not
show it. What a seed draws changes with the order of draws, which these entries do not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import pytest
import torch
from borrowing import borrowed
from hand_made import case

from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.known_issues.entries import KnownIssue, matching, ours
from zerocheck.run.known_issues.releases import Releases

DRAWN = [issue for issue in ours() if issue.obligation == "damage" and issue.case is not None]


@pytest.fixture(scope="module")
def with_deepspeed(deepspeed_pool: Pool) -> Iterator[Pool]:
    with borrowed(deepspeed_pool, patience_s=10.0) as ranks:
        yield ranks


@pytest.mark.every(6)
@pytest.mark.parametrize("issue", DRAWN, ids=lambda issue: issue.fingerprint)
def test_the_own_case_shows_the_damage(request: pytest.FixtureRequest, issue: KnownIssue) -> None:
    deepspeed = issue.implementation.startswith("deepspeed")
    if deepspeed and find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    if not issue.known_in(Releases({"torch": torch.__version__})):
        pytest.skip("not in this release")
    pool: Pool = request.getfixturevalue("with_deepspeed" if deepspeed else "pool")
    assert issue.case is not None
    outcome = Trial(pool, issue.implementation, issue.case, obligations=("damage",)).outcome()
    assert outcome.judgement is not None, outcome.reason
    finished = msgspec.structs.replace(
        case(status="violated"), implementation=issue.implementation, case=issue.case
    )
    shown = [
        entry
        for violation in outcome.judgement.violations
        for entry in matching(ours(), finished, violation)
    ]
    assert issue in shown, outcome.judgement.violations
