"""Which violations of one case are findings of their own."""

from __future__ import annotations

import msgspec
import pytest

from zerocheck.case.schema import Case
from zerocheck.protocol.verdicts import Judgement, Obligation, Violation
from zerocheck.run.findings.consequences import independent
from zerocheck.run.findings.findings import Findings
from zerocheck.run.records.finding_text import finding_title
from zerocheck.run.records.records import CaseFinished


def violation(obligation: Obligation, step: int = 0, *causes: str, mild: bool = False) -> Violation:
    return Violation(
        obligation=obligation,
        step=step,
        role="parameter",
        tensors=(),
        ranks=(),
        explanation="wrong",
        causes=causes,
        mild=mild,
    )


def answer(*violations: Violation) -> list[str]:
    return [one.obligation for one in independent(violations)]


@pytest.mark.parametrize(
    ("first", "then"),
    [("gradient", "publish"), ("loss", "gradient"), ("update", "publish"), ("publish", "loss")],
)
def test_what_follows_is_no_finding(first: Obligation, then: Obligation) -> None:
    assert answer(violation(then, 1), violation(first, 0)) == [first]


def test_what_follows_from_a_consequence_is_no_finding() -> None:
    chain = (violation("gradient", 0), violation("publish", 0), violation("loss", 1))
    assert answer(*chain) == ["gradient"]
    assert answer(*chain[1:]) == ["publish"]
    assert answer(chain[0], chain[2]) == ["gradient", "loss"]


def test_what_is_mild_leads_to_nothing() -> None:
    assert answer(violation("clip", 0, mild=True), violation("publish", 1)) == ["clip", "publish"]


def test_ranks_with_gradients_of_their_own_skip_steps_of_their_own() -> None:
    disagree = violation("update", 1, "ranks disagree")
    assert answer(violation("gradient"), violation("publish"), disagree) == ["gradient"]
    assert answer(disagree) == ["update"]
    assert answer(violation("gradient", 2), disagree) == ["update", "gradient"]
    # Another wrong update is one of its own.
    assert answer(violation("gradient"), violation("update", 1)) == ["gradient", "update"]


def test_what_is_in_no_optimizer_keeps_its_gradient() -> None:
    never = violation("update", 0, "never updated")
    kept = violation("gradient", 1, "gradient of the previous step kept")
    assert answer(never, kept) == ["update"]
    assert answer(violation("update", 0), kept) == ["update", "gradient"]
    assert answer(never, violation("gradient", 1)) == ["update", "gradient"]


def _finished(*words: str, shown: Violation | None = None) -> CaseFinished:
    judgement = Judgement(
        statuses={"gradient": "violated"},
        violations=(shown or violation("gradient", 0, "gradient x W"),),
        words=words,
    )
    return CaseFinished(
        number=0, implementation="mine", case=Case(), status="violated", judgement=judgement
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_that_tells_no_cause_is_no_finding_of_its_own(first: int) -> None:
    """One element at 1.11 bounds lay within the bound of an unrelated cause."""
    faint = msgspec.structs.replace(violation("update", 0, "by chance"), wrong=1, ratio=1.11)
    telling = msgspec.structs.replace(violation("update", 0), wrong=700, ratio=2e4)
    assert faint.faint and not telling.faint
    findings = Findings()
    shown = (faint, telling)
    findings.add(_finished(shown=shown[first]))
    findings.add(_finished(shown=shown[1 - first]))
    (bug,) = findings.bugs
    assert bug.causes == () and bug.cases == 2 and bug.violation == telling


def test_a_finding_names_the_words_under_which_all_its_cases_hold() -> None:
    findings = Findings()
    (bug,) = findings.add(_finished("average='sum'", "divide_ranks='loss'"))
    fingerprint = bug.fingerprint
    assert bug.finding(0).words == ("average='sum'", "divide_ranks='loss'")
    findings.add(_finished("average='sum'"))
    finding = bug.finding(0)
    assert finding_title(finding) == (
        "VIOLATED mine: wrong. If intended, declare Semantics(average='sum')"
    )
    assert finding.fingerprint == fingerprint
    assert findings.add(_finished()) == [bug]
    assert finding_title(bug.finding(0)) == "VIOLATED mine: wrong"
