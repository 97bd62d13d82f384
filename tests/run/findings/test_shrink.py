"""Failing cases made small, and what is said of how far a bug reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from collected import whole_run
from msgspec.structs import replace

from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.reductions import value_at
from zerocheck.case.schema import Block, Case, Data, Group, Model, Optimizer, Sharding, Training
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run import engine
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings import shrink as shrinking
from zerocheck.run.findings.bug import Bug, Shrunk
from zerocheck.run.findings.case_file import read
from zerocheck.run.findings.findings import Findings
from zerocheck.run.findings.shrink import HANG_TRIES, TRIES, Limits, cost, shrink, worth
from zerocheck.run.known_issues.entries import KnownIssue
from zerocheck.run.records.finding_text import finding_text
from zerocheck.run.records.records import CaseFinished, Finding
from zerocheck.run.replay import replay

SUBJECTS = Path(__file__).parents[1] / "subjects.py"

LARGE = Case(
    mesh=(3,),
    seed=3,
    model=Model(
        stem="embedding",
        inputs=7,
        width=12,
        outputs=7,
        tied=True,
        blocks=(
            Block(kind="mlp", hidden=11, residual=True, bias=False),
            Block(kind="attention", heads=3),
        ),
        calls=(0, 1, 0),
    ),
    data=Data(batch=3, length=2),
    optimizer=Optimizer(groups=(Group(pattern="*.bias", weight_decay=0.0), Group()), amsgrad=True),
    training=Training(steps=2, microbatches=3, clip=0.003, set_to_none=False),
    sharding=Sharding(wrap="layer", reshard=False, prefetch=2),
)
"""Not small in any dimension."""


Smallest = Callable[..., Shrunk]


@pytest.fixture
def smallest(pool: Pool) -> Smallest:
    """smallest(name, case) -> what is left of it."""

    def found(name: str, case: Case = LARGE, **limits: object) -> Shrunk:
        bug = failing(pool, name, case)
        shrunk = shrink(bug, pool, EQUIVALENCE, Limits(**limits))
        assert shrunk is not None
        assert shrunk.finished.status == bug.status
        assert shrunk.tries <= TRIES + 1
        return shrunk

    return found


def failing(pool: Pool, name: str, case: Case) -> Bug:
    where = name if ":" in name else f"{SUBJECTS}:{name}"
    bugs = Findings().add(Trial(pool, where, case).outcome().record(0, where, case))
    assert len(bugs) == 1, [bug.title for bug in bugs]
    return bugs[0]


def default(**given: object) -> Case:
    """The smallest case but for what is given."""
    training = Training(steps=1, **given.pop("training", {}))
    return Case(seed=LARGE.seed, training=training, **given)


@pytest.mark.long
def test_a_fault_that_needs_nothing(smallest: Smallest) -> None:
    shrunk = smallest("not_averaged")
    assert shrunk.finished.case == default()
    assert shrunk.size == "2 ranks, no blocks, 1 step"
    assert shrunk.extent == "with all options at their default; on every rank; in all parameters"
    assert shrunk.groups == ("basic",)
    assert shrunk.tries < 12


@pytest.mark.long
def test_a_fault_that_needs_microbatches_and_no_second_rank(smallest: Smallest) -> None:
    shrunk = smallest("zerocheck.faults.accumulation:LastMicrobatchOnly")
    assert shrunk.finished.case == default(mesh=(1,), training={"microbatches": 2})
    assert shrunk.extent.startswith("only with several microbatches, on one rank already; in ")
    assert shrunk.groups == ("training",)


@pytest.mark.long
def test_a_fault_that_needs_three_ranks(smallest: Smallest) -> None:
    shrunk = smallest("not_averaged_from_3_ranks")
    assert shrunk.finished.case == default(mesh=(3,))
    assert shrunk.extent.startswith("only from 3 ranks on; on every rank")
    assert shrunk.groups == ("world",)


@pytest.mark.long
def test_a_fault_of_what_ranks_do_not_divide_is_not_one_of_three_ranks(smallest: Smallest) -> None:
    shrunk = smallest("not_averaged_where_uneven")
    assert shrunk.finished.case.world_size <= 3
    message = "only with a parameter whose first dim the world does not divide"
    assert shrunk.extent.startswith(message)
    assert " ranks on" not in shrunk.extent
    assert shrunk.groups == ("world",)


@pytest.mark.long
def test_a_fault_that_needs_a_module_used_twice(smallest: Smallest) -> None:
    shrunk = smallest("not_averaged_if_used_twice")
    assert shrunk.finished.case == default(model=Model(blocks=(Block(kind="mlp"),), calls=(0, 0)))
    assert shrunk.size == "2 ranks, 1 block, 1 step"
    assert shrunk.extent.startswith("only with a module used twice; ")
    assert shrunk.groups == ("model",)


def test_a_fault_that_needs_tied_weights(smallest: Smallest) -> None:
    shrunk = smallest("zerocheck.faults.gradient:TiedReducedTwice")
    case = shrunk.finished.case
    assert case.model.tied and not case.model.blocks and case.world_size <= 2
    assert shrunk.extent.startswith("only with head tied to the embedding")
    assert "in stem.weight" in shrunk.extent


def test_a_fault_of_the_second_step(smallest: Smallest) -> None:
    shrunk = smallest("zerocheck.faults.gradient:SyncFirstStepOnly")
    # One step is enough: a forward and a backward follow the last one.
    assert shrunk.finished.case == default()
    assert shrunk.extent.startswith("only from the second step on")
    assert shrunk.violation is not None and shrunk.violation.step == 1
    assert shrunk.groups == ("basic",)


def test_a_fault_of_some_groups(smallest: Smallest) -> None:
    shrunk = smallest("zerocheck.faults.update:DecayOnExcluded")
    groups = shrunk.finished.case.optimizer.groups
    assert [group.weight_decay > 0 for group in groups] == [False, True]
    assert shrunk.extent.startswith("only with groups with and without weight decay")
    assert shrunk.groups == ("optimizer",)


def test_a_crash_stays_the_same_crash(smallest: Smallest) -> None:
    shrunk = smallest("RaisesInMicrobatches", LARGE)
    # One that says something else in another number: numbers do not count.
    assert shrunk.finished.case == default(mesh=(1,), training={"microbatches": 2})
    assert shrunk.extent == "only with several microbatches, on one rank already"
    alone = smallest("RaisesOnOneRank", LARGE)
    assert alone.finished.case == default()


def test_a_hang_is_made_small_in_a_few_tries(smallest: Smallest) -> None:
    shrunk = smallest("Hangs")
    assert shrunk.finished.case == default()
    assert shrunk.tries <= 4


@pytest.mark.long
def test_fixed_fields_stay(smallest: Smallest) -> None:
    kept = ("model", "training.clip", "mesh")
    case = smallest("not_averaged", kept=kept).finished.case
    assert all(value_at(case, path) == value_at(LARGE, path) for path in kept)
    assert case.training == Training(steps=1, clip=LARGE.training.clip)
    assert (case.data, case.optimizer, case.sharding) == (Data(), Optimizer(), Sharding())


@pytest.mark.long
def test_known_hangs_are_not_run_and_known_issues_are_not_taken_for_it(smallest: Smallest) -> None:
    def single(case: Case) -> bool:
        return case.training.steps == 1

    shrunk = smallest("not_averaged", avoided=single)
    assert shrunk.finished.case.training.steps == 2
    shrunk = smallest("not_averaged", listed=lambda finished, violation: single(finished.case))
    assert shrunk.finished.case.training.steps == 2


@pytest.mark.long
def test_the_clock_decides_nothing(smallest: Smallest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each run takes a minute; what a finding says is the same."""
    quick = smallest("not_averaged")
    now = iter(range(0, 10**6, 20))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(shrinking, "time", clock)
    slow = smallest("not_averaged")
    assert (slow.finished.case, slow.extent, slow.tries) == (
        quick.finished.case, quick.extent, quick.tries
    )  # fmt: skip


def test_large_cases_and_hangs_count_as_several_tries() -> None:
    assert cost(Case()) < 1.01
    large = replace(LARGE, model=replace(LARGE.model, width=4096, inputs=4096, outputs=4096))
    assert cost(large) > 10
    assert TRIES / HANG_TRIES == 4


@pytest.mark.long
def test_a_search_that_may_not_go_on_keeps_what_it_has(smallest: Smallest) -> None:
    shrunk = smallest("not_averaged", tries=0)
    assert shrunk.finished.case == LARGE and shrunk.tries == 0
    assert shrunk.extent.startswith(
        "what it needs is not all known, the search ended after 0 tries"
    )


@pytest.mark.parametrize(("confirmed", "tries"), [(0, 5), (2, 5), (0, 0)])
def test_what_shows_sometimes_is_not_shrunk(confirmed: int, tries: int) -> None:
    case = CaseFinished(number=0, implementation="ddp", case=LARGE, status="crashed")
    bug = Bug("ddp", "crashed", None, (), case, confirmed=confirmed, tries=tries)
    assert not worth(bug)
    bug.confirmed = bug.tries = 1
    assert worth(bug)
    bug.issue = KnownIssue(fingerprint="ddp / crashed", reason="upstream", source="entry 1")
    assert not worth(bug)


def findings(
    tmp_path: Path, pool: Pool, name: str, **given: object
) -> tuple[list[Finding], list[CaseFinished]]:
    """Findings of a whole run, as they are told at its end, and its cases."""
    options = {"world_sizes": (3,), "max_cases": 12, "report_dir": tmp_path} | given
    code, records = whole_run(pool, name, **options)
    assert code == 1
    last = {record.number: record for record in records.of(Finding)}
    return list(last.values()), records.of(CaseFinished)


def test_the_case_file_is_the_smallest_and_fails_again(tmp_path: Path, pool: Pool) -> None:
    name = "zerocheck.faults.gradient:LossTimesWorld"
    (found,), cases = findings(tmp_path, pool, name, max_cases=4)
    # Named by a case of the run, where 3 ranks tell the causes apart.
    assert found.causes == ("gradient x W",)
    assert found.title == "gradient is 2 times too large: summed over 2 ranks, not averaged"
    assert any(case.number == found.case_number for case in cases)
    (file,) = (tmp_path / "findings").glob("*.json")
    assert str(file) == found.case_file
    written = read(file)
    assert written.case == Case(seed=written.case.seed, training=Training(steps=1))
    text = finding_text(found).splitlines()
    assert "  smallest    2 ranks, no blocks, 1 step" in text
    assert any(line.startswith("  extent      with all options at their default") for line in text)
    assert not any(line.startswith("  what") for line in text)
    replayed = replay(written, implementation=name, ranks=pool)
    assert replayed is not None
    assert replayed.verdict.startswith("reproduced bit for bit: violated again")


@pytest.mark.long
def test_without_shrinking_the_case_is_the_one_that_was_drawn(tmp_path: Path, pool: Pool) -> None:
    name = "zerocheck.faults.gradient:LossTimesWorld"
    (found,), cases = findings(tmp_path, pool, name, max_cases=4, shrink=False)
    assert found.size == found.extent == ""
    written = read(Path(found.case_file)).case
    assert [case.case for case in cases if case.number == found.case_number] == [written]


@pytest.mark.long
def test_two_faults_are_two_findings_each_with_its_extent(tmp_path: Path, pool: Pool) -> None:
    """Though some cases show both, and small cases that show the other one are at hand."""
    found, cases = findings(
        tmp_path,
        pool,
        f"{SUBJECTS}:TwoFaults",
        features=("microbatches", "some-decay"),
        max_cases=4,
    )
    both = [
        case
        for case in cases
        if case.judgement is not None
        and {"gradient", "update"} <= {v.obligation for v in case.judgement.violations}
    ]
    assert both
    loss, decay = sorted(found, key=lambda finding: finding.obligation or "")
    assert "gradient x GA" in loss.causes
    assert decay.causes == ("weight decay on excluded parameters",)
    assert loss.extent.startswith("only with several microbatches, on one rank already; in ")
    assert decay.extent.startswith("only with groups with and without weight decay, on one rank")
    assert (loss.groups, decay.groups) == (("training",), ("optimizer",))
    first, second = (read(Path(finding.case_file)).case for finding in (loss, decay))
    assert first == Case(mesh=(1,), seed=first.seed, training=Training(steps=1, microbatches=2))
    assert second.training == Training(steps=1)
    assert len(second.optimizer.groups) == 2


@pytest.mark.long
def test_one_fault_that_shows_as_several_obligations_is_one_finding(
    tmp_path: Path, pool: Pool
) -> None:
    name = "zerocheck.faults.gradient:OneParameterUnreduced"
    (one,), cases = findings(tmp_path, pool, name, max_cases=3)
    violated = {
        violation.obligation
        for case in cases
        if case.judgement is not None
        for violation in case.judgement.violations
    }
    assert {"gradient", "publish"} <= violated
    assert one.obligation == "gradient" and one.follows == ("publish",)
    assert one.extent == "with all options at their default; on every rank; in stem.weight"


@pytest.mark.long
def test_what_an_implementation_fixes_stays(tmp_path: Path, pool: Pool) -> None:
    name = f"{SUBJECTS}:NotAveragedOfOneModel"
    (found,), _ = findings(tmp_path, pool, name, max_cases=2)
    written = read(Path(found.case_file)).case
    assert written.model == Model(inputs=5)
    assert written.training == Training(steps=1, clip=0.003)
    assert found.extent.startswith("with all options at their default; on every rank")


@pytest.mark.long
def test_findings_beyond_the_tries_of_a_run_keep_their_case(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RUN_TRIES", 0)
    name = "zerocheck.faults.gradient:LossTimesWorld"
    (found,), cases = findings(tmp_path, pool, name, max_cases=2)
    assert found.size == "" and found.extent == "not searched for, others took 0 tries"
    written = read(Path(found.case_file)).case
    assert written in [case.case for case in cases]


def test_large_is_large() -> None:
    """The start of most tests above has what they need."""
    has = set(features(LARGE))
    assert {"module-twice", "tied", "uneven", "microbatches", "some-decay", "world-3"} <= has
    assert not set(features(draw(1, seed=0, world_sizes=(1,))[0])) & {"tied", "microbatches"}
