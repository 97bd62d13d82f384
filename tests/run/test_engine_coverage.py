"""Runs that promise all pairs: what is left out fails them, what is refused does not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from borrowing import borrowed
from collected import Collect, Run, whole_run

from zerocheck.case import covering
from zerocheck.case.covering import Pairs
from zerocheck.case.features import OF_STEPS, features
from zerocheck.ranks.pool import Pool
from zerocheck.run.plan import profiles
from zerocheck.run.records.records import CaseFinished, Coverage, RunFinished
from zerocheck.run.records.tally import tally

SUBJECTS = Path(__file__).with_name("subjects.py")


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    """Rank processes for all runs of this module."""
    with borrowed(session_pool, patience_s=5.0) as ranks:
        yield ranks


@pytest.fixture
def run_subject(tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run_subject("Name", ...) -> (exit code, records): a ci run of small cases on two ranks."""
    monkeypatch.setattr(covering, "LEAST", 1_500)
    monkeypatch.setattr(covering, "QUIET", 300)
    monkeypatch.setitem(
        profiles.PROFILES,
        "ci",
        profiles.Profile(
            name="ci",
            cases=1,
            world_sizes=(2,),
            meshes=(),
            summary="",
            resumed=1,
            resumed_sizes=(2,),
            covering=True,
        ),
    )

    def start(name: str, **given: object) -> tuple[int, Collect]:
        options = {"profile": "ci", "report_dir": tmp_path} | given
        return whole_run(pool, f"{SUBJECTS}:{name}", **options)

    return start


def pairs_of(records: list[CaseFinished]) -> set[tuple[str, str]]:
    """Counted by hand; all cases have two ranks."""
    return {pair for one in records for pair in combinations(features(one.case), 2)}


@pytest.mark.long
def test_every_supported_pair_is_judged_and_the_rest_is_said(run_subject: Run) -> None:
    code, records = run_subject("SupportsNoEmbedding")
    assert code == 0, records[-1]
    (coverage,) = records.of(Coverage)
    judged = records.of(CaseFinished)
    assert {one.status for one in judged} == {"holds"}
    wanted = set(Pairs(coverage.features).named(int(coverage.supported, 16)))
    assert len(wanted) > 1_200
    assert wanted <= pairs_of(judged)
    assert "wrap-layer" in coverage.ignored and not [p for p in wanted if "wrap-layer" in p]
    assert {one.reason for one in coverage.refused} == {"no embeddings", "no inf-norm"}
    (counted,) = tally(records).implementations.values()
    assert counted.covered.not_exercised["tied"] == "refused: no embeddings"
    assert counted.covered.not_exercised["reshard"] == "ignored by it"


def test_max_cases_leave_pairs_out_and_fail_the_run(run_subject: Run) -> None:
    code, records = run_subject("RefusesDropoutWhenBuilt", max_cases=4)
    assert code == 1
    assert len(records.of(CaseFinished)) == 4
    (message,) = records.of(RunFinished)[0].why
    assert "supported pairs of features were left out, e.g. " in message
    assert message.endswith("(--max-cases 4)")
    assert {one.status for one in records.of(CaseFinished)} <= {"holds", "unsupported"}


@pytest.mark.long
def test_what_is_refused_when_built_is_sought_elsewhere_and_then_given_up(run_subject: Run) -> None:
    code, records = run_subject("RefusesDropoutWhenBuilt")
    assert code == 0, records[-1]
    (coverage,) = records.of(Coverage)
    done = records.of(CaseFinished)
    judged = [one for one in done if one.status == "holds"]
    assert {one.status for one in done} == {"holds", "unsupported"}
    wanted = set(Pairs(coverage.features).named(int(coverage.supported, 16)))
    lost = wanted - pairs_of(judged)
    assert {pair for pair in wanted if "dropout" in pair} <= lost
    # What a few rounds cannot find is counted as refused: next to nothing.
    with_dropout = {"dropout", "carried-rng", "checkpoint-dropout"}
    assert len([pair for pair in lost if not with_dropout & set(pair)]) <= 2
    (counted,) = tally(records).implementations.values()
    assert counted.covered.refused_count == len(lost) and not counted.covered.left_out
    assert counted.covered.not_exercised == {
        name: counted.covered.not_exercised[name]
        for name in OF_STEPS
        if not counted.covered.exercised[name]
    }
    assert counted.covered.not_exercised["dropout"] == "refused: no dropout"


def test_a_supports_that_raises_shows_in_the_cases(run_subject: Run) -> None:
    code, records = run_subject("SupportsRaises", max_cases=2, shrink=False)
    assert code == 1
    assert {one.status for one in records.of(CaseFinished)} == {"crashed"}
    assert "supports() fails" in records.of(CaseFinished)[0].reason
    (counted,) = tally(records).implementations.values()
    assert counted.covered.covered_count == 0 and counted.covered.left_out
