"""A module that computes with its first parameters for ever: named in every step, by either way."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Group,
    Model,
    Optimizer,
    Sharding,
    Start,
    Training,
)
from zerocheck.protocol.verdicts import Judgement
from zerocheck.run.findings.consequences import sources_of
from zerocheck.run.known_issues.entries import matching, ours
from zerocheck.run.records.records import CaseFinished

MOVED = "moved_parameters:Moved"
PREFETCHED = "zerocheck.faults.elsewhere.copies:PrefetchedBeforeUpdate"
CAUSE = "module of an earlier step"
CASE = Case(
    mesh=(2,),
    model=Model(
        inputs=5,
        width=6,
        outputs=3,
        blocks=(Block(kind="recurrent"), Block(kind="mlp", dropout=0.5)),
    ),
    data=Data(batch=3, length=2),
    training=Training(steps=4, microbatches=2),
)
BY_BLOCK = Sharding(wrap="block")
TINY = Case(
    mesh=(2,),
    model=Model(blocks=(Block(kind="recurrent"),)),
    training=Training(steps=2),
    optimizer=Optimizer(groups=(Group(lr=3e-05),)),
    start=Start(zeros=("head.*",)),
)
"""The head is so small that no loss shows what moved, and the gradient does."""


def known(case: Case, judgement: Judgement) -> list[bool]:
    """Of each violation that is a source, whether it is listed, on a GPU."""
    finished = CaseFinished(
        status="violated", judgement=judgement, number=1, implementation="fsdp2", case=case
    )

    def listed(violation: object) -> bool:
        return bool(matching(ours(), finished, violation))  # type: ignore[arg-type]

    return [listed(one) for one in sources_of(judgement, listed)]


def test_every_step_has_the_cause_and_is_the_known_issue(observe: Callable) -> None:
    """Found on a GPU: of three wrong steps the first was known, and the next a new finding."""
    judgement = observe(MOVED, CASE).judge()
    found = [*judgement.violations, *judgement.further]
    assert [(one.obligation, one.step) for one in found] == [("loss", n) for n in (1, 2, 3, 4)]
    assert all(one.causes == (CAUSE,) for one in found)
    for ago, one in enumerate(found[1:], 2):
        assert f"blocks.0.gru has the parameters of {ago} steps before" in one.explanation
    assert known(CASE, judgement) == [True] * 4


def test_a_gradient_shows_what_no_loss_does(observe: Callable) -> None:
    judgement = observe(MOVED, TINY).judge()
    assert judgement.statuses["loss"] == "holds"
    (violation,) = judgement.violations
    assert violation.obligation == "gradient" and violation.causes == (CAUSE,)
    assert "blocks.0.gru has the parameters of the step before" in violation.explanation
    assert known(TINY, judgement) == [True]


def test_a_module_may_be_as_before_in_the_first_microbatch_alone(observe: Callable) -> None:
    """It was gathered before the update, and is gathered again for the next microbatch."""
    judgement = observe(PREFETCHED, msgspec.structs.replace(CASE, sharding=BY_BLOCK)).judge()
    violation = judgement.violations[0]
    assert (violation.obligation, violation.step, violation.causes) == ("loss", 1, (CAUSE,))
    words = "blocks.0.gru has the parameters of the step before in microbatch 0 alone"
    assert words in violation.explanation
