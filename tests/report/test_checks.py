"""What the test of an obligation and a group says, from records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hand_made import KNOWN, case, failed, finding, finished, held, known, stale, started

from zerocheck.case.features import BASIC, GROUPS, groups
from zerocheck.case.schema import Block, Case, Model, Sharding, TrainingSegment
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, OBLIGATIONS, RESUME, Obligation
from zerocheck.report.checks import coverage_outcome, groups_of, outcome_of
from zerocheck.run.records.records import CaseFinished, Finding, Record
from zerocheck.run.records.tally import exit_code, tally

SHARDED = Case(sharding=Sharding(reshard=False))


def outcomes(records: Sequence[Record], name: str = "zero2") -> dict[tuple[str, str], str]:
    """(obligation, group) -> outcome, but for what is skipped."""
    counted = tally(records)
    found = {
        (obligation, group): outcome_of(counted, name, obligation, group).outcome
        for obligation in counted.obligations
        for group in groups_of(obligation)
    }
    return {place: outcome for place, outcome in found.items() if outcome != "skipped"}


def failing(records: Sequence[Record], name: str = "zero2") -> set[tuple[str, str]]:
    return {place for place, outcome in outcomes(records, name).items() if outcome == "failed"}


def violated(number: int = 1, *, of: Case = SHARDED, **given: Any) -> CaseFinished:
    record = case(number, status="violated", gradient="violated", **given)
    return msgspec.structs.replace(record, case=of)


def run(*findings: Finding, cases: Sequence[Record] = ()) -> list[Record]:
    return [started(), case(0), *(cases or [violated()]), *findings, finished(1)]


def test_groups() -> None:
    assert groups(Case()) == {BASIC}
    assert groups(SHARDED) == {BASIC, "sharding"}
    assert groups(SHARDED, ignored=("keep-gathered",)) == {BASIC}
    both = Case(mesh=(3,), model=Model(blocks=(Block(kind="mlp"),)))
    assert groups(both) == {BASIC, "world", "model"}
    assert groups(Case(resume=(TrainingSegment(),))) == {BASIC}
    assert groups(Case(resume=(TrainingSegment(mesh=(3,)),))) == {BASIC, "resume"}
    for obligation in OBLIGATIONS:
        assert ("resume" in groups_of(obligation)) == (obligation in RESUME)
    assert len(GROUPS) == 10 and groups_of("gradient")[0] == BASIC


def test_what_holds_passes_where_it_was_exercised() -> None:
    found = outcomes([*held(1)[:-1], msgspec.structs.replace(case(1), case=SHARDED), finished()])
    assert set(found) == {(o, g) for o in EQUIVALENCE for g in (BASIC, "sharding")}
    assert set(found.values()) == {"passed"}
    counted = tally(held())
    assert outcome_of(counted, "zero2", "clip", "model").text == (
        "clip with features of model: not exercised in 2 cases"
    )
    assert coverage_outcome(counted, "zero2").outcome == "passed"


@pytest.mark.parametrize(
    ("needs", "where"),
    [
        ((), {BASIC}),
        ((BASIC,), {BASIC}),
        (("sharding",), {"sharding"}),
        (("model", "training"), {"model", "training"}),
        (("resume",), {BASIC}),  # gradients have no test of that group
    ],
)
def test_a_finding_fails_the_groups_that_it_needs(needs: tuple[str, ...], where: set[str]) -> None:
    assert failing(run(finding(groups=needs))) == {("gradient", group) for group in where}


def test_a_failure_reads_as_on_the_console() -> None:
    text = outcome_of(tally(run(finding())), "zero2", "gradient", BASIC).text
    lines = text.splitlines()
    assert lines[0] == "VIOLATED zero2: the reduced gradient is 4 times too large"
    assert lines[-1].startswith("  replay      zerocheck replay ")


def test_what_follows_fails_with_what_it_follows_from() -> None:
    records = run(
        finding(groups=("sharding",), follows=("publish",)), cases=[violated(publish="violated")]
    )
    assert failing(records) == {("gradient", "sharding"), ("publish", "sharding")}
    text = outcome_of(tally(records), "zero2", "publish", "sharding").text
    assert text.startswith("publish: 1 violated of 2, which may follow from this:\nVIOLATED zero2")


def test_a_violation_without_a_finding_fails_too() -> None:
    assert failing(run(cases=[violated()])) == {("gradient", BASIC)}


def test_a_crash_fails_every_obligation_and_shows_its_stacks() -> None:
    assert failing(failed(), "ddp") == {(o, BASIC) for o in EQUIVALENCE}
    message = outcome_of(tally(failed()), "ddp", "clip", BASIC)
    assert message.text.startswith("CRASHED ddp: the ranks crashed: IndexError")
    assert "Traceback" in message.detail and "Traceback" not in message.text


def test_known_and_stale_issues() -> None:
    assert {p: o for p, o in outcomes(known()).items() if o != "passed"} == {
        ("gradient", BASIC): "known", ("publish", BASIC): "known",
    }  # fmt: skip
    assert failing([*held()[:-1], stale()]) == {("gradient", BASIC)}
    # Another finding of the same obligation is not hidden by it.
    both = [*known()[:-1], violated(2), finding(number=1, groups=("sharding",)), finished(1)]
    assert failing(both) == {("gradient", "sharding")}
    assert KNOWN.reason in outcome_of(tally(known()), "zero2", "gradient", BASIC).text


def test_what_was_not_checked_fails() -> None:
    records = [started(), case(clip="not exercised"), finished(1)]
    assert failing(records) == {("clip", BASIC)}
    records = [started(), case(status="unsupported", reason="no mesh"), finished(1)]
    assert failing(records) == {(o, g) for o in EQUIVALENCE for g in groups_of(o)}
    message = coverage_outcome(tally(records), "zero2")
    assert message.outcome == "failed" and "since no mesh" in message.text


def test_an_obligation_that_a_model_leaves_no_room_for_is_skipped() -> None:
    left = tuple(obligation for obligation in EQUIVALENCE if obligation != "loss")
    one = started(obligations=left, without={"loss": "its loss is no scalar"})
    counted = tally([one, case(), finished()])
    assert outcome_of(counted, "zero2", "loss", BASIC) == (
        "skipped",
        "loss: its loss is no scalar",
        "",
    )
    assert outcome_of(counted, "zero2", "gradient", BASIC).outcome == "passed"


def test_what_an_implementation_says_that_no_case_exercises_is_skipped() -> None:
    """Of it alone, and where no case exercised it all the same."""
    one = started("zero2", "ddp", without_of={"zero2": {"clip": "it clips nothing"}})
    records = [one, case(clip="not exercised"), case(1, "ddp", clip="not exercised"), finished(1)]
    counted = tally(records)
    assert outcome_of(counted, "zero2", "clip", BASIC) == ("skipped", "clip: it clips nothing", "")
    assert outcome_of(counted, "ddp", "clip", BASIC).outcome == "failed"
    counted = tally([one, case(), case(1, "ddp"), finished()])
    assert outcome_of(counted, "zero2", "clip", BASIC).outcome == "passed"


@pytest.mark.parametrize(
    "records",
    [
        held(),
        known(),
        run(finding()),
        run(finding(groups=("sharding", "model"))),
        run(cases=[violated()]),
        [*held()[:-1], stale()],
        [started(), case(clip="not exercised"), finished(1)],
        [
            started(without_of={"zero2": {"clip": "it clips nothing"}}),
            case(clip="not exercised"),
            finished(),
        ],
        [started(), finished(1)],
        [started(), case(), case(1, status="hung", reason="rank 0 waits"), finished(1)],
    ],
)
def test_tests_fail_where_the_command_line_does(records: list[Record]) -> None:
    counted = tally(records)
    fails = bool(failing(records)) or coverage_outcome(counted, "zero2").outcome == "failed"
    assert fails == bool(exit_code(counted))


def test_memory_has_groups_too() -> None:
    obligation: Obligation = MEMORY[0]
    assert groups_of(obligation) == tuple(group for group in GROUPS if group != "resume")
