"""Counts, and the exit code that follows from them."""

from __future__ import annotations

import math

import pytest
from hand_made import case, failed, finding, finished, held, known, stale, started

from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.run.records.records import Record, RunFinished
from zerocheck.run.records.tally import exit_code, leaving_out, run_exit_code, tally, unchecked, why


def test_all_hold() -> None:
    counted = tally(held(3))
    assert exit_code(counted) == 0 and why(counted) == ()
    assert counted.complete and counted.cases == counted.planned == 3
    (implementation,) = counted.implementations.values()
    assert implementation.cases == {"holds": 3}
    assert implementation.world_sizes == {2: 3}
    assert implementation.semantics == {"average": "mean"}
    for cell in implementation.cells.values():
        assert cell.status == "holds" and cell.checked == 3 and cell.share == 0.25


def test_a_failed_run() -> None:
    counted = tally(failed())
    zero2, ddp = counted.implementations["zero2"], counted.implementations["ddp"]
    assert zero2.cells["gradient"].counts == {"holds": 1, "violated": 1}
    assert zero2.cells["gradient"].status == "violated"
    assert zero2.cells["update"].counts == {"holds": 1, "not exercised": 1}
    assert zero2.cells["update"].status == "holds"
    assert zero2.cells["gradient"].share == 3.0e7
    assert zero2.world_sizes == {2: 1, 3: 1}
    for cell in ddp.cells.values():
        assert cell.counts == {"crashed": 1, "unsupported": 1} and cell.status == "crashed"
    assert ddp.unsupported == {"no empty parameters": 1}
    assert not ddp.covered.exercised
    assert exit_code(counted) == 1
    assert why(counted) == (
        "zero2: 1 finding in 2 cases: 1 violated, 1 passed",
        "ddp: 1 finding in 2 cases: 1 crashed, 1 unsupported",
    )
    assert [f.status for f in counted.findings_of("ddp", "clip")] == ["crashed"]
    assert [f.status for f in counted.findings_of("zero2", "clip")] == []
    assert [f.status for f in counted.findings_of("zero2", "gradient")] == ["violated"]


@pytest.mark.parametrize("status", ["violated", "crashed", "hung"])
def test_every_failing_status_exits_1(status: str) -> None:
    counted = tally([started(), case(0), case(1, status=status), finished(1)])  # type: ignore[arg-type]
    assert exit_code(counted) == 1


def test_a_finding_alone_exits_1() -> None:
    assert exit_code(tally([*held()[:-1], finding(), finished(1)])) == 1


def test_unsupported_beside_holds_exits_0() -> None:
    counted = tally([started(), case(0), case(1, status="unsupported", reason="no")])
    assert exit_code(counted) == 0
    assert all(cell.status == "holds" for cell in counted.implementations["zero2"].cells.values())


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "nothing was checked: no case was run"),
        (
            [case(status="unsupported", reason="no mesh")],
            "nothing was checked: 1 of 1 cases are unsupported, most often since no mesh",
        ),
        (
            [case(number, status="unsupported", reason=why) for number, why in enumerate("abb")],
            "nothing was checked: 3 of 3 cases are unsupported, most often since b",
        ),
        (
            [case(**{obligation: "not exercised" for obligation in EQUIVALENCE})],
            "nothing was checked: none of 1 cases exercised an obligation",
        ),
        (
            [case(clip="not exercised"), case(clip="not exercised")],
            "nothing was checked for clip: none of 2 cases exercised it "
            "(--obligations can leave it out)",
        ),
    ],
)
def test_nothing_checked_exits_1(records: list[Record], message: str) -> None:
    counted = tally([started(), *records])
    assert exit_code(counted) == 1
    assert why(counted) == (f"zero2: {message}",)


def test_what_an_implementation_says_that_no_case_exercises() -> None:
    one = started("zero2", "ddp", without_of={"zero2": {"clip": "it clips nothing"}})
    counted = tally([one, case(clip="not exercised"), case(1, "ddp")])
    assert exit_code(counted) == 0
    assert list(unchecked(counted)) == [("zero2", "clip", "it clips nothing")]
    assert list(unchecked(tally([one, case(), case(1, "ddp")]))) == []
    counted = tally([one, case(), case(1, "ddp", clip="not exercised")])
    (message,) = why(counted)
    assert "ddp: nothing was checked for clip" in message
    # Where nothing else was looked at either, the run fails all the same.
    nothing = case(**dict.fromkeys(EQUIVALENCE, "not exercised"))  # type: ignore[arg-type]
    assert exit_code(tally([one, nothing, case(1, "ddp")])) == 1


def test_only_what_was_asked_for_counts() -> None:
    counted = tally([started(obligations=("update",)), case(clip="not exercised")])
    assert list(counted.implementations["zero2"].cells) == ["update"]
    assert exit_code(counted) == 0


def test_one_implementation_unchecked_beside_a_good_one_exits_1() -> None:
    counted = tally([started("zero2", "ddp"), case()])
    assert exit_code(counted) == 1
    assert why(counted) == ("ddp: nothing was checked: no case was run",)


def test_nan_never_hides_as_a_small_share() -> None:
    counted = tally([started(), case(share=math.nan), case(share=0.5)])
    assert counted.implementations["zero2"].cells["loss"].share == math.inf


def test_features_exercised_and_not() -> None:
    implementation = tally([started(), case(mesh=(3,))]).implementations["zero2"]
    assert implementation.covered.exercised["world-3"] == 1
    assert "world-3" not in implementation.covered.not_exercised
    assert "world-2" in implementation.covered.not_exercised


def test_what_an_interrupted_run_did_not_check_is_no_reason() -> None:
    """The cases that were not run may have had it. What is wrong in those that ran stays."""
    unchecked = case(0, clip="not exercised")
    bad = [case(1, "zero2", "violated", gradient="violated"), finding()]
    end = RunFinished(outcome="interrupted", exit_code=130, seconds=1.0)
    assert why(tally([started(), unchecked, finished(1)])) != ()
    assert why(tally([started(), unchecked, end])) == ()
    assert why(tally([started(), end])) == ()
    assert why(tally([started(), unchecked, *bad, end])) == (
        "zero2: 1 finding in 2 cases: 1 violated, 1 passed",
    )


def test_an_interrupted_run_is_not_complete() -> None:
    assert not tally([started(), case()]).complete
    end = RunFinished(outcome="interrupted", exit_code=130, seconds=1.0)
    assert not tally([started(), case(), end]).complete
    assert run_exit_code(tally([started(), case(), end])) == 130
    assert run_exit_code(tally([started(), case()])) == 130
    assert run_exit_code(tally(held())) == 0 and run_exit_code(tally(failed())) == 1


def test_known_issues_are_counted_apart() -> None:
    counted = tally(known())
    zero2 = counted.implementations["zero2"]
    assert zero2.cases == {"holds": 1, "known": 1}
    assert zero2.cells["gradient"].counts == {"holds": 1, "known": 1}
    assert zero2.cells["gradient"].status == zero2.cells["publish"].status == "known"
    assert zero2.cells["gradient"].checked == 2
    assert zero2.cells["update"].status == "holds"
    assert not counted.findings and len(counted.known) == 1
    assert exit_code(counted) == 0


def test_a_new_violation_beside_a_known_one_fails_the_case() -> None:
    both = case(status="violated", gradient="violated", update="violated", known=("gradient",))
    counted = tally([started(), both])
    zero2 = counted.implementations["zero2"]
    assert zero2.cases == {"violated": 1}
    assert zero2.cells["gradient"].status == "known"
    assert zero2.cells["update"].status == "violated"
    assert exit_code(counted) == 1


def test_a_known_crash_is_no_check_of_anything() -> None:
    crash = case(status="crashed", known=EQUIVALENCE)
    alone = tally([started(), crash])
    assert alone.implementations["zero2"].cases == {"known": 1}
    assert alone.implementations["zero2"].nothing_checked
    assert exit_code(alone) == 1
    beside = tally([started(), crash, case()])
    assert beside.implementations["zero2"].cells["clip"].checked == 1
    assert exit_code(beside) == 0


def test_a_stale_issue_exits_1() -> None:
    counted = tally([*held()[:-1], stale(), finished(1)])
    assert exit_code(counted) == 1
    assert why(counted) == (
        "zero2: a known issue is stale: zero2 / gradient / x W (known.toml, entry 2)",
    )


def test_what_is_not_exercised_says_what_to_declare() -> None:
    assert leaving_out("--obligations", "clip") == "--obligations can leave it out"
    assert leaving_out("--obligations", "persistent") == (
        "--obligations can leave it out; or declare the stage of your code, or its layout; "
        "offloaded state is not judged"
    )
