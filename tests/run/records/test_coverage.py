"""Coverage counted from the journal: what was exercised, refused, ignored and left out."""

from __future__ import annotations

import msgspec
from hand_made import case, finished, started

from zerocheck.case.covering import Pairs
from zerocheck.case.features import OF_STEPS
from zerocheck.case.schema import Case, Model
from zerocheck.protocol.verdicts import VACUOUS, Judgement
from zerocheck.report.coverage import coverage_lines, not_exercised
from zerocheck.report.markdown import render as markdown
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import CaseFinished, Coverage, Record, RefusedPairs
from zerocheck.run.records.tally import Tally, exit_code, tally, why

PAIRS = Pairs(OF_STEPS)
PLAIN, UNUSED = Case(mesh=(2,)), Case(mesh=(2,), model=Model(unused=True))


def hexed(*cases: Case) -> str:
    """The pairs of some cases."""
    bits = 0
    for one in cases:
        bits |= PAIRS.of(one)
    return f"{bits:x}"


def wanted(*cases: Case, **given: object) -> Coverage:
    fields = {"implementation": "zero2", "features": OF_STEPS} | given
    return Coverage(supported=hexed(*cases), **fields)  # type: ignore[arg-type]


def ran(one: Case, status: str = "holds", **given: object) -> CaseFinished:
    return msgspec.structs.replace(case(status=status, **given), case=one)  # type: ignore[arg-type]


def counted(*records: Record) -> Tally:
    return tally([started(), *records, finished()])


def test_all_pairs_covered() -> None:
    run = counted(wanted(PLAIN, UNUSED), ran(PLAIN), ran(UNUSED))
    covered = run.implementations["zero2"].covered
    assert covered.covered_count == covered.supported_count == PAIRS.of(UNUSED).bit_count()
    assert not covered.left_out and exit_code(run) == 0


def test_what_no_judged_case_had_was_left_out_and_fails_the_run() -> None:
    run = counted(wanted(UNUSED, max_cases=1), ran(PLAIN))
    covered = run.implementations["zero2"].covered
    missing = PAIRS.of(UNUSED) & ~PAIRS.of(PLAIN)
    assert covered.left_out == missing
    assert exit_code(run) == 1
    total, left = PAIRS.of(UNUSED).bit_count(), missing.bit_count()
    assert why(run) == (
        f"zero2: {left} of {total} supported pairs of features were left out, e.g. unused with "
        "world-2 (--max-cases 1)",
    )
    assert covered.not_exercised["unused"] == "left out"
    assert covered.not_exercised["world-3"] == "not possible here"
    assert "1 of" not in markdown(run) and "left out" in markdown(run)


def test_a_case_that_crashed_exercised_nothing() -> None:
    run = counted(wanted(PLAIN, UNUSED), ran(PLAIN), ran(UNUSED, "crashed"))
    left = (PAIRS.of(UNUSED) & ~PAIRS.of(PLAIN)).bit_count()
    message = why(run)[-1]
    assert f"zero2: {left} of " in message
    assert f"({left} stand in cases that crashed or hung)" in message


def test_a_violated_case_was_judged() -> None:
    run = counted(wanted(PLAIN), ran(PLAIN, "violated", gradient="violated"))
    assert not run.implementations["zero2"].covered.left_out


def test_what_was_refused_when_built_is_refused_and_not_left_out() -> None:
    run = counted(wanted(PLAIN, UNUSED), ran(PLAIN), ran(UNUSED, "unsupported", reason="too big"))
    covered = run.implementations["zero2"].covered
    missing = PAIRS.of(UNUSED) & ~PAIRS.of(PLAIN)
    assert covered.refused == {"too big": missing}
    assert covered.supported_count == covered.covered_count == PAIRS.of(PLAIN).bit_count()
    assert covered.not_exercised["unused"] == "refused: too big"
    assert exit_code(run) == 0
    # A later case that is judged shows that the pairs are supported after all.
    again = counted(
        wanted(PLAIN, UNUSED), ran(UNUSED, "unsupported", reason="too big"), ran(UNUSED)
    )
    assert not again.implementations["zero2"].covered.refused


def test_refused_at_once_and_ignored_are_said() -> None:
    only = PAIRS.of(UNUSED) & ~PAIRS.of(PLAIN)
    record = wanted(
        PLAIN, refused=(RefusedPairs(reason="no | spare", pairs=f"{only:x}"),), ignored=("reshard",)
    )
    run = counted(record, *[ran(PLAIN)] * 3)
    covered = run.implementations["zero2"].covered
    assert covered.not_exercised["unused"] == "refused: no | spare"
    assert covered.not_exercised["reshard"] == "ignored by it"
    assert not covered.exercised["reshard"]
    line = coverage_lines(run)[0]
    assert f"{only.bit_count()} refused; 1 features ignored" in line
    text = markdown(run)
    assert r"no \| spare" in text and "ignored" in text


def test_a_random_run_promises_nothing() -> None:
    run = counted(Coverage(implementation="zero2", features=OF_STEPS), ran(PLAIN))
    covered = run.implementations["zero2"].covered
    assert not covered.counted and coverage_lines(run) == [] and exit_code(run) == 0
    assert covered.not_exercised["unused"] == "not drawn"


def test_the_record_round_trips_and_other_versions_are_read() -> None:
    record = wanted(PLAIN, UNUSED, ignored=("reshard",))
    back = msgspec.json.decode(encode(record), type=Coverage)
    assert back == record
    assert len(encode(record)) < 8_000
    older = msgspec.structs.replace(record, features=("gone", *OF_STEPS), supported="")
    run = counted(older, ran(PLAIN))
    assert run.implementations["zero2"].covered.exercised["world-2"] == 1


def vacuous(one: Case, *obligations: str) -> CaseFinished:
    done = ran(one)
    assert isinstance(done.judgement, Judgement)
    answer = msgspec.structs.replace(done.judgement, vacuous=obligations)
    return msgspec.structs.replace(done, judgement=answer)


def test_a_pair_in_which_nothing_could_fail_is_not_covered_and_fails_no_run() -> None:
    run = counted(wanted(PLAIN, UNUSED), vacuous(UNUSED, "gradient"), ran(PLAIN))
    covered = run.implementations["zero2"].covered
    assert covered.could_not_fail == PAIRS.of(UNUSED) & ~PAIRS.of(PLAIN) & ~covered._judged
    assert covered.could_not_fail and not covered.left_out and exit_code(run) == 0
    assert "could not fail" in coverage_lines(run)[0]
    assert covered.not_exercised["unused"] == "could not fail: " + VACUOUS["gradient"]
    assert "unused" in not_exercised(run)
    again = counted(wanted(PLAIN, UNUSED), vacuous(UNUSED, "gradient"), ran(UNUSED))
    assert not again.implementations["zero2"].covered.could_not_fail
    assert "unused" not in not_exercised(again)
    assert "pairs" not in not_exercised(again)


def test_the_last_line_says_what_was_not_exercised() -> None:
    run = counted(
        Coverage(implementation="zero2", features=OF_STEPS), vacuous(PLAIN, "clip", "loss")
    )
    assert not_exercised(run).startswith(
        "not exercised: loss, clip (could not fail); resume, memory (not asked for); "
    )
    assert not_exercised(run).endswith(
        "; all pairs of features (--profile ci); more than 2 steps, more than 64 elements a tensor"
    )
    assert "Not exercised: loss, clip" in markdown(run)


def test_vacuous_exercises_are_counted_and_named() -> None:
    run = counted(wanted(PLAIN), *[vacuous(PLAIN, "clip")] * 3, vacuous(PLAIN))
    implementation = run.implementations["zero2"]
    clip = implementation.cells["clip"]
    assert (clip.checked, clip.vacuous, clip.informative) == (4, 3, 1)
    assert implementation.cells["loss"].vacuous == 0
    assert set(implementation.hardly_checked) == {"clip"}
    message = "clip could have failed in 1 of 4 cases; in the others the norm does not reach"
    assert message in "\n".join(coverage_lines(run))
    assert "| 3 of 4 " in markdown(run)
