"""Resumed cases end to end: right checkpoints are silent, each broken one is caught and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from collected import whole_run

from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Block, Case, DamageKind, Model, Training, TrainingSegment
from zerocheck.protocol.verdicts import RESUME, Load, Obligation, Violation
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.consequences import independent
from zerocheck.run.records.records import Finding, Outcome

SUBJECTS = Path(__file__).with_name("resume_subjects.py")
SILENT = {"sharding": {"static_graph": False}}
"""DDP itself crashes where the graph is wrongly said to be static."""


def outcomes(pool: Pool, name: str, count: int) -> list[Outcome]:
    cases = draw_resumed(count, seed=5, world_sizes=(1, 2, 3), fixed=SILENT)
    assert len(cases) == count
    trials = [Trial(pool, f"{SUBJECTS}:{name}", case).outcome() for case in cases]
    return [one for one in trials if one.status != "unsupported"]


def violations(found: list[Outcome]) -> list[Violation]:
    return [v for one in found if one.judgement is not None for v in one.judgement.violations]


def told_of(outcome: Outcome, *obligations: Obligation) -> bool:
    """Whether it says anything of these obligations."""
    statuses = {} if outcome.judgement is None else outcome.judgement.statuses
    return any(statuses.get(one) in ("holds", "violated") for one in obligations)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["Keeping", "InBackground"])
def test_right_checkpoints_are_silent(pool: Pool, name: str) -> None:
    found = outcomes(pool, name, 16)
    found = [one for one in found if not told_of(one, "durability", "damage")]
    assert not violations(found)
    assert {one.status for one in found} == {"holds"}
    held = {
        obligation
        for one in found
        if one.judgement is not None
        for obligation, status in one.judgement.statuses.items()
        if status == "holds"
    }
    assert {"export", "roundtrip", "continuation"} <= held


def test_what_planted_faults_do_not_show_is_named(pool: Pool) -> None:
    """An older file that is left where it was, and an option that no tensor shows."""
    over = draw_resumed(4, seed=5, world_sizes=(1, 2, 3), fixed=SILENT, having=("resume-over",))
    older = violations([Trial(pool, f"{SUBJECTS}:OlderLeft", case).outcome() for case in over])
    assert any("state of an earlier step" in one.causes for one in older)
    plain = Case(resume=(TrainingSegment(),))
    (decay,) = violations([Trial(pool, f"{SUBJECTS}:DecayLost", plain).outcome()])
    assert (decay.obligation, decay.in_step) == ("continuation", "update")
    assert "weight decay missing" in decay.causes


def test_shards_that_are_lost_by_a_load_are_of_the_load(pool: Pool) -> None:
    judgement = (
        Trial(pool, f"{SUBJECTS}:ShardLost", Case(resume=(TrainingSegment(),))).outcome().judgement
    )
    assert judgement is not None
    (violation,) = judgement.violations
    assert (violation.obligation, violation.step) == ("roundtrip", 1)
    assert violation.explanation.startswith("after load 1, ownership: ")
    assert judgement.loads == (Load(segment=1, violated=("roundtrip",)),)
    assert judgement.statuses["continuation"] == "not exercised"


def test_a_checkpoint_before_the_first_step_changes_nothing(pool: Pool) -> None:
    for over in (False, True):
        case = Case(resume=(TrainingSegment(over=over),))
        found = violations([Trial(pool, f"{SUBJECTS}:SavingBegins", case).outcome()])
        answer = [(v.obligation, v.role, v.step, v.causes) for v in independent(found)]
        causes = ("changed by saving", "first step counted by saving")
        assert answer == [("roundtrip", "step", -1, causes)] * over


def test_the_random_state_of_another_rank_is_seen_where_ranks_are_as_many(pool: Pool) -> None:
    case = Case(mesh=(2,), resume=(TrainingSegment(mesh=(2,)),))
    (violation,) = violations([Trial(pool, f"{SUBJECTS}:RandomOfRank0", case).outcome()])
    assert (violation.role, violation.ranks) == ("rng", (1,))
    assert violation.causes == ("random state of rank 0 on all ranks",)


@pytest.mark.long
def test_a_lost_older_checkpoint_and_an_unseen_damage_are_violations(pool: Pool) -> None:
    """torch.save over the only file keeps neither the old one nor a checksum."""
    found: list[Violation] = []
    for seed in range(6):
        for segment in (TrainingSegment(over=True, killed=0.5), TrainingSegment(damage="flip")):
            case = Case(seed=seed, training=Training(steps=1), resume=(segment,))
            found += violations([Trial(pool, f"{SUBJECTS}:Keeping", case).outcome()])
    assert {v.obligation for v in found} >= {"damage"}
    assert {v.obligation for v in found} <= {"damage", "durability"}
    assert any(" flipped), and it was loaded" in v.explanation for v in found)


def test_ranks_that_wait_for_one_that_refused_are_no_hang(pool: Pool) -> None:
    """A damaged file is refused by one rank alone; and so is a whole one, which is tried first."""
    case = Case(seed=1, mesh=(2,), resume=(TrainingSegment(mesh=(2,), damage="truncate"),))
    (violation,) = violations([Trial(pool, f"{SUBJECTS}:RefusesAlone", case).outcome()])
    answer = (violation.obligation, violation.ranks, violation.causes)
    assert answer == ("damage", (1,), ("ranks disagree",))
    assert "others loaded it, or waited" in violation.explanation
    (violation,) = violations([Trial(pool, f"{SUBJECTS}:NeverLoads", case).outcome()])
    answer = (violation.obligation, violation.ranks, violation.causes)
    assert answer == ("roundtrip", (1,), ("refused",))
    assert "ValueError: nothing of mine" in violation.explanation


def test_every_load_is_told_of(pool: Pool) -> None:
    case = Case(
        mesh=(2,), resume=(TrainingSegment(mesh=(3,)), TrainingSegment(mesh=(1,), damage="remove"))
    )
    judgement = Trial(pool, f"{SUBJECTS}:Keeping", case).outcome().judgement
    assert judgement is not None
    assert judgement.loads[:2] == (Load(segment=1), Load(segment=2))
    assert judgement.loads[2].segment == 2 and judgement.loads[2].gave is not None
    judgement = Trial(pool, f"{SUBJECTS}:MomentsLost", case).outcome().judgement
    assert judgement is not None
    assert judgement.loads == tuple(
        Load(segment=segment, violated=("roundtrip",)) for segment in (1, 2)
    )


def test_a_save_that_spoils_the_state_counts_for_the_load_that_reads_it(pool: Pool) -> None:
    case = Case(resume=(TrainingSegment(), TrainingSegment()))
    judgement = Trial(pool, f"{SUBJECTS}:SavingSteps", case).outcome().judgement
    assert judgement is not None
    assert [load.segment for load in judgement.loads] == [1, 2]
    assert all("roundtrip" in load.violated for load in judgement.loads)


def test_only_what_was_asked_for_is_told_of_loads(pool: Pool) -> None:
    case = Case(resume=(TrainingSegment(),))
    trial = Trial(pool, f"{SUBJECTS}:MomentsLost", case, obligations=("export",))
    judgement = trial.outcome().judgement
    assert judgement is not None and judgement.loads == (Load(segment=1),)


def test_a_crash_says_how_many_loads_had_begun(pool: Pool) -> None:
    for resume in ((TrainingSegment(),), (TrainingSegment(mesh=(3,)), TrainingSegment(mesh=(1,)))):
        outcome = Trial(pool, f"{SUBJECTS}:CannotLoad", Case(resume=resume)).outcome()
        assert outcome.status == "crashed" and outcome.begun == 1, outcome.reason
        assert outcome.reason.startswith("after load 1: ")


def test_a_writer_is_killed_before_it_has_finished(pool: Pool) -> None:
    """Though its first save was much slower than the one that is killed."""
    case = Case(resume=(TrainingSegment(killed=0.9),))
    outcome = Trial(pool, f"{SUBJECTS}:SlowAtFirst", case).outcome()
    assert outcome.judgement is not None
    assert outcome.judgement.loads[1].gave in ("new", "none", "wrong")  # not unharmed
    assert "durability" not in outcome.judgement.vacuous


def test_an_implementation_without_checkpoints_says_so(pool: Pool) -> None:
    outcome = Trial(
        pool,
        f"{Path(__file__).with_name('subjects.py')}:NoSaving",
        Case(resume=(TrainingSegment(),)),
    )
    assert outcome.outcome().reason == "it has no save() and load(), so it cannot be resumed"


def test_a_segment_on_more_ranks_is_judged_from_the_first_step_after_the_load(pool: Pool) -> None:
    case = Case(mesh=(1,), resume=(TrainingSegment(mesh=(3,), steps=2), TrainingSegment(mesh=(2,))))
    outcome = Trial(pool, f"{SUBJECTS}:Keeping", case).outcome(digest=True)
    assert outcome.judgement is not None
    assert outcome.judgement.statuses["continuation"] == "holds"
    assert len(outcome.judgement.digest) == 3 * 32


def found_in(name: str, tmp_path: Path, pool: Pool) -> Finding:
    """The only finding of a run that fails. The subjects verify no file, which is no bug here."""
    code, records = whole_run(
        pool,
        f"{SUBJECTS}:{name}",
        obligations=tuple(one for one in RESUME if one != "damage"),
        world_sizes=(1, 2, 3),
        max_cases=10,
        report_dir=tmp_path,
    )
    assert code == 1
    (finding,) = records.tally.findings
    return finding


@pytest.mark.long
def test_one_bug_is_one_finding_with_a_small_case(tmp_path: Path, pool: Pool) -> None:
    finding = found_in("MomentsLost", tmp_path, pool)
    assert finding.causes == ("optimizer state lost",)
    assert (finding.obligation, finding.confirmed) == ("roundtrip", finding.tries)
    assert finding.size == "1 rank then 1, no blocks, 1 step"
    assert "with all options at their default" in finding.extent


@pytest.mark.long
def test_a_bug_of_many_ranks_keeps_them_when_shrunk(tmp_path: Path, pool: Pool) -> None:
    finding = found_in("PositionOfOneRank", tmp_path, pool)
    assert "data position of one rank" in finding.causes
    assert finding.size.startswith("2 ranks then")


OF_TORCH = {
    "a step for a state that was asked for": Case(resume=(TrainingSegment(over=True),)),
    "the same in the background": Case(resume=(TrainingSegment(over=True, background=True),)),
    "buffers of several ranks": Case(
        mesh=(3,),
        model=Model(blocks=(Block(kind="batch_norm"),)),
        resume=(TrainingSegment(mesh=(2,)),),
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", OF_TORCH)
def test_a_user_who_has_no_save_is_not_blamed_for_that_of_torch(pool: Pool, name: str) -> None:
    case = OF_TORCH[name]
    assert Trial(pool, "fsdp2", case).outcome().status == "violated"
    outcome = Trial(pool, f"{SUBJECTS}:wrapped", case).outcome()
    assert (outcome.status, violations([outcome])) == ("holds", [])
    assert told_of(outcome, "export") and told_of(outcome, "continuation")


@pytest.mark.parametrize("damage", ["flip", "mix"])
def test_a_user_who_has_no_load_is_not_blamed_for_what_that_of_torch_takes(
    pool: Pool, damage: DamageKind
) -> None:
    """What it refuses is checked all the same."""
    case = Case(resume=(TrainingSegment(damage=damage),))
    outcome = Trial(pool, f"{SUBJECTS}:wrapped", case).outcome()
    assert outcome.status == "unsupported"
    assert "reports/findings/dcp-loads-a-damaged-checkpoint.md" in outcome.reason
    refused = Case(resume=(TrainingSegment(damage="remove"),))
    outcome = Trial(pool, f"{SUBJECTS}:wrapped", refused).outcome()
    assert outcome.status == "holds" and told_of(outcome, "damage")
