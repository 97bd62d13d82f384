"""Which cases a run has: the covering array of an implementation, and what stands in for others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec
import pytest
from benchmarks.measuring import planned
from slices import sliced

from zerocheck.case import covering
from zerocheck.case.capabilities import CAPABILITIES
from zerocheck.case.covering import ALONE, Pairs
from zerocheck.case.features import OF_OPTIMIZERS, OF_STEPS, features
from zerocheck.case.mesh import AXES
from zerocheck.case.schema import Case
from zerocheck.errors import UsageError
from zerocheck.protocol.replies import Description
from zerocheck.protocol.verdicts import RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.plan import Plan, SharedDraws
from zerocheck.run.records.records import Coverage

PAIRS = Pairs(OF_STEPS)
RESTORES = Description(restores=True, capabilities=CAPABILITIES, axes=AXES)
DRAWN: dict[str, SharedDraws] = {}
"""To draw takes seconds; `test_what_was_drawn_already_gives_the_same_plans`."""


@pytest.fixture(autouse=True)
def fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for two world sizes, and quicker."""
    monkeypatch.setattr(covering, "LEAST", 1_500)
    monkeypatch.setattr(covering, "QUIET", 500)


def plan(
    refuses: Callable[[Case], str | None] = lambda case: None,
    *,
    described: Description = RESTORES,
    drawn: SharedDraws | None = None,
    **given: object,
) -> Plan:
    """A plan for `ddp`, whose supports() is `refuses`. Unless it is given, what was drawn for these
    options and this description is what an earlier test drew."""

    def ask(name: str, cases: Sequence[Case]) -> list[str | None]:
        return [refuses(case) for case in cases]

    options = {"implementations": ("ddp",), "profile": "ci", "world_sizes": (2, 3)} | given
    if drawn is None:
        drawn = DRAWN.setdefault(repr((options, described)), SharedDraws())
    return Plan(RunOptions(**options), {"ddp": described}, ask, drawn)  # type: ignore[arg-type]


def pairs_of(cases: Sequence[Case]) -> set[tuple[str, str]]:
    """All pairs, counted by hand."""
    return {
        pair
        for has in map(features, cases)
        for pair in combinations(has, 2)
        if ALONE not in has or ALONE in pair
    }


def wanted(coverage: Coverage) -> set[tuple[str, str]]:
    return set(Pairs(coverage.features).named(int(coverage.supported or "0", 16)))


def refused(coverage: Coverage) -> dict[str, set[tuple[str, str]]]:
    pairs = Pairs(coverage.features)
    return {one.reason: set(pairs.named(int(one.pairs, 16))) for one in coverage.refused}


def test_ci_covers_what_it_promises() -> None:
    planned = plan()
    (coverage,) = planned.coverage
    assert coverage.max_cases is None and coverage.refused == ()
    # No case of AdamW has them.
    others = {name for names in OF_OPTIMIZERS.values() for name in names}
    assert set(coverage.ignored) == others - set(OF_OPTIMIZERS["adamw"])
    assert len(wanted(coverage)) > 2_000
    assert wanted(coverage) <= pairs_of([item.case for item in planned.cases])
    assert len(planned.cases) >= 100


@pytest.mark.long
def test_the_same_options_give_the_same_plan() -> None:
    first, again, other = plan(drawn=SharedDraws()), plan(drawn=SharedDraws()), plan(seed=1)
    assert first.cases == again.cases and first.coverage == again.coverage
    assert other.cases != first.cases


def test_quick_promises_nothing() -> None:
    planned = plan(
        profile="quick",
        described=Description(
            restores=True, options=("wrap",), capabilities=CAPABILITIES, axes=AXES
        ),
    )
    (coverage,) = planned.coverage
    assert coverage.supported == "" and len(planned.cases) == 48
    assert "prefetch-none" in coverage.ignored and "wrap-whole" not in coverage.ignored


def test_refused_cases_are_not_run_and_not_waited_for() -> None:
    def refuses(case: Case) -> str | None:
        if "clip-inf" in features(case) and case.model.stem == "embedding":
            return "no inf-norm of embeddings"
        return "no tied heads" if case.model.tied else None

    planned = plan(refuses)
    (coverage,) = planned.coverage
    array = [item.case for item in planned.cases[: len(planned.cases) // 4]]
    assert not any(refuses(case) for case in array)
    by_reason = refused(coverage)
    by_inf_norm = by_reason["no inf-norm of embeddings"]
    assert {("stem-embedding", "clip-inf"), ("padding-idx", "clip-inf")} <= by_inf_norm
    # Of two rare features few candidates have both, and all of these may be refused.
    assert sum("clip-inf" not in pair and "tied" not in pair for pair in by_inf_norm) <= 2
    assert all("tied" in pair for pair in by_reason["no tied heads"])
    assert ("stem-embedding", "tied") in by_reason["no tied heads"]
    assert not wanted(coverage) & set().union(*by_reason.values())
    assert wanted(coverage) <= pairs_of([i.case for i in planned.cases if not refuses(i.case)])


def test_what_an_implementation_ignores_is_not_counted() -> None:
    described = Description(
        restores=True, options=("bucket",), capabilities=CAPABILITIES, axes=AXES
    )
    (coverage,) = plan(described=described).coverage
    assert {"wrap-whole", "reshard", "prefetch-several"} <= set(coverage.ignored)
    assert "bucket-small" not in coverage.ignored
    assert not [pair for pair in wanted(coverage) if set(pair) & set(coverage.ignored)]


def test_fields_that_are_fixed_leave_fewer_pairs() -> None:
    described = Description(
        fixed={"training": {"clip": None}}, restores=False, capabilities=CAPABILITIES, axes=AXES
    )
    (coverage,) = plan(described=described).coverage
    there = {name for pair in wanted(coverage) for name in pair}
    assert "keep-gradients" in there
    assert not there & {"clip", "clip-inf", "mid-training", "step-255", "moments-huge"}


@pytest.mark.long
def test_max_cases_cuts_the_array_and_says_so() -> None:
    planned = plan(max_cases=10)
    assert len(planned.cases) == 10
    assert planned.coverage[0].max_cases == 10
    assert wanted(planned.coverage[0]) == wanted(plan().coverage[0])
    assert plan(max_cases=100_000).coverage[0].max_cases is None


@pytest.mark.long
def test_an_implementation_that_refuses_all_has_one_case_to_say_so() -> None:
    planned = plan(lambda case: "never")
    assert len(planned.cases) == 1
    (coverage,) = planned.coverage
    assert coverage.supported == "" and set(refused(coverage)) == {"never"}


def test_features_asked_for() -> None:
    planned = plan(features=("tied",))
    assert all("tied" in features(item.case) for item in planned.cases)
    assert ("tied", "padding-idx") in wanted(planned.coverage[0])
    with pytest.raises(UsageError, match="no case for ddp has the features asked for"):
        plan(features=("tied", "stem-dense"))


def run_all(planned: Plan, refuses: Callable[[Case], bool]) -> list[Case]:
    """As the engine does, with `refuses` at build time; the cases that were judged."""
    judged = []
    number = 0
    while number < len(planned.cases) or planned.more():
        item = planned.cases[number]
        planned.note(item, refused=refuses(item.case))
        if not refuses(item.case):
            judged.append(item.case)
        number += 1
    return judged


def elsewhere(
    lost: set[tuple[str, str]], planned: Plan, refuses: Callable[[Case], bool]
) -> set[tuple[str, str]]:
    """The pairs that some candidate has which is not refused."""
    (pool,) = planned._drawn._pools.values()
    kept = [set(features(case)) for case in pool if not refuses(case)]
    return {pair for pair in lost if any(set(pair) <= names for names in kept)}


@pytest.mark.long
def test_other_cases_stand_in_for_one_that_is_refused_when_built() -> None:
    """The cases that go first bring the most, and these are refused for no reason at all."""
    planned = plan(profile="ci")
    bad = {item.case for item in planned.cases[:5]}
    judged = run_all(planned, lambda case: case in bad)
    lost = wanted(planned.coverage[0]) - pairs_of(judged)
    # What a few rounds cannot find is counted as refused: next to nothing.
    assert len(elsewhere(lost, planned, lambda case: case in bad)) <= 2
    assert len(set(judged)) == len(judged)


@pytest.mark.parametrize(
    "names",
    [("tied",), *sliced([("block-conv", "frozen"), ("unused", "clip-inf"), ("dropout",)], [])],
)
def test_what_is_always_refused_when_built_is_given_up_and_nothing_else(
    names: tuple[str, ...],
) -> None:
    planned = plan()
    before = len(planned.cases)
    judged = run_all(planned, lambda case: set(names) <= set(features(case)))
    lost = wanted(planned.coverage[0]) - pairs_of(judged)
    if len(names) > 1:
        assert names in {tuple(pair) for pair in lost}
    else:
        assert {pair for pair in lost if names[0] in pair}
    # What a few rounds cannot find is counted as refused: next to nothing.
    possible = elsewhere(lost, planned, lambda case: set(names) <= set(features(case)))
    collateral = {pair for pair in possible if not set(names) & set(pair)}
    assert len(collateral) <= 2, sorted(collateral)
    assert len(planned.cases) - before <= 80


@pytest.mark.long
def test_what_was_drawn_already_gives_the_same_plans() -> None:
    """Also after another plan noted refusals, and for who refuses or ignores something else."""

    def refuses(case: Case) -> str | None:
        return "no tied heads" if case.model.tied else None

    ignoring = Description(restores=True, options=("bucket",), capabilities=CAPABILITIES, axes=AXES)
    drawn = SharedDraws()
    first = plan(drawn=drawn)
    run_all(first, lambda case: case.model.unused)
    for given in ({}, {"refuses": refuses}, {"described": ignoring}, {"seed": 1}):
        shared = plan(drawn=drawn, **given)  # type: ignore[arg-type]
        alone = plan(drawn=SharedDraws(), **given)  # type: ignore[arg-type]
        assert shared.cases == alone.cases and shared.coverage == alone.coverage
        assert run_all(shared, lambda case: False) == run_all(alone, lambda case: False)


def test_max_cases_leaves_no_room_for_others() -> None:
    planned = plan(max_cases=10)
    run_all(planned, lambda case: True)
    assert len(planned.cases) == 10


RESUMES = Description(restores=True, resumes=True, capabilities=CAPABILITIES, axes=AXES)


def resumed(**given: object) -> list[Case]:
    return [item.case for item in plan(described=RESUMES, **given).cases]


def test_resumed_cases_save_and_load_on_all_of_sixteen_world_sizes() -> None:
    cases = resumed(obligations=RESUME, world_sizes=())
    assert {case.world_size for case in cases} == set(range(1, 17))
    assert {math.prod(case.resume[0].mesh) for case in cases} == set(range(1, 17))
    given = resumed(obligations=RESUME, world_sizes=(2, 3))
    assert {segment.mesh[0] for case in given for segment in case.resume} == {2, 3}


@pytest.mark.parametrize(("profile", "least"), [("smoke", 1), ("quick", 3), ("ci", 3)])
def test_some_resumed_cases_exercise_each_obligation(profile: str, least: int) -> None:
    segments = [case.resume[-1] for case in resumed(obligations=RESUME, profile=profile)]
    assert sum(segment.killed is not None for segment in segments) >= least
    assert sum(segment.damage != "none" for segment in segments) >= least


def test_durability_and_damage_alone_have_no_other_cases() -> None:
    killed = resumed(obligations=("durability",), max_cases=5)
    assert len(killed) == 5 and all(case.resume[-1].killed is not None for case in killed)
    damaged = resumed(obligations=("damage",), max_cases=5)
    assert all(case.resume[-1].damage != "none" for case in damaged)
    segments = [
        case.resume[-1] for case in resumed(obligations=("damage", "durability"), max_cases=6)
    ]
    assert sorted(segment.killed is None for segment in segments) == [False] * 3 + [True] * 3
    whole = resumed(obligations=("durability", "export"), max_cases=5)
    assert any(case.resume[-1].killed is None for case in whole)


@pytest.mark.long
def test_benchmarks_have_cases_of_every_implementation(pool: Pool) -> None:
    """Those of known issues are left out there, and must not be most of them."""
    options = RunOptions(profile="quick", max_cases=8)
    counts = Counter(item.implementation for item in planned(pool, options))
    assert min(counts[name] for name in options.implementations) >= 4


def _meshes(**given: object) -> list[tuple[int, ...]]:
    return [item.case.mesh for item in plan(**given).cases]  # type: ignore[arg-type]


def test_a_replicate_axis_is_for_those_that_handle_it() -> None:
    sizes = {"profile": "quick", "world_sizes": (4, 6)}
    both = _meshes(**sizes)
    assert len(both) == 48 and {4, 6} == {math.prod(mesh) for mesh in both}
    two = {mesh for mesh in both if len(mesh) == 2}
    assert two >= {(2, 2)} and sum(len(mesh) == 2 for mesh in both) == 16
    lacks = Description(restores=True, capabilities=CAPABILITIES, axes=("shard", "tp"))
    assert {len(mesh) for mesh in _meshes(described=lacks, **sizes)} == {1}
    # Who asks for them is told why not.
    asked = _meshes(described=lacks, features=("two-axes",), **sizes)
    assert {len(mesh) for mesh in asked} == {2}


@pytest.mark.long
def test_the_array_has_each_pair_of_a_mesh_of_two_axes() -> None:
    covered = [item.case for item in plan(world_sizes=(4,)).cases]
    assert ("two-axes", "clip") in pairs_of(covered)
    assert ("two-axes", "sync-shards") in pairs_of(covered)


COMPILED_OR_TP = ("compile", "compile-aot", "tensor-parallel")
HANDLED = {
    (name, size)
    for name in COMPILED_OR_TP
    for size in (2, 3)
    if (name, size) != ("tensor-parallel", 3)
}
RACES = {"delays", "microbatches", "bucket-small"}


def apart(cases: Sequence[Case]) -> set[tuple[str, int]]:
    return {
        (name, case.world_size)
        for case in cases
        for name in features(case)
        if name in COMPILED_OR_TP
    }


def races(cases: Sequence[Case]) -> Counter[int]:
    return Counter(case.world_size for case in cases if set(features(case)) >= RACES)


def test_what_stands_in_no_array_has_a_case_on_each_world_size() -> None:
    """Else code that is wrong where it is compiled passes `--profile ci`."""
    assert apart([one.case for one in plan().cases]) >= HANDLED


def test_races_have_several_cases_on_each_world_size() -> None:
    """Else it is luck whether a buffer that is filled while it is sent is seen."""
    found = races([one.case for one in plan().cases])
    assert found[2] >= 3 and found[3] >= 3
    fixed = Description(
        restores=True, fixed={"sharding": {"bucket": 1 << 20}}, capabilities=CAPABILITIES, axes=AXES
    )
    assert not races([one.case for one in plan(described=fixed).cases])


def test_nor_is_there_one_that_is_refused_or_not_handled() -> None:
    def refuses(case: Case) -> str | None:
        return "no aot" if case.training.compile == "aot_eager" else None

    described = Description(restores=True, capabilities=CAPABILITIES, axes=("replicate", "shard"))
    found = apart([one.case for one in plan(refuses, described=described).cases])
    assert found & HANDLED == {("compile", 2), ("compile", 3)}


def test_who_asks_for_features_gets_these_alone() -> None:
    cases = [one.case for one in plan(features=("clip",)).cases]
    assert all("clip" in features(case) for case in cases)


@pytest.mark.parametrize("obligations", [("gradient",), ("roundtrip",)])
def test_a_quick_run_goes_on_where_most_cases_cannot_be_built(obligations: tuple[str, ...]) -> None:
    def narrow(case: Case) -> bool:
        return case.training.clip is None or case.training.microbatches > 1

    described = Description(restores=True, resumes=True, capabilities=CAPABILITIES)
    planned = plan(described=described, profile="quick", obligations=obligations)
    first = len(planned.cases)
    done = 0
    while done < len(planned.cases) or planned.more():
        item = planned.cases[done]
        done += 1
        planned.note(item, refused=narrow(item.case))
    able = sum(not narrow(item.case) for item in planned.cases)
    assert done > first and able >= first // 2
    assert len({item.case for item in planned.cases}) == done


def test_a_quick_run_has_no_more_cases_than_asked_for() -> None:
    planned = plan(
        described=Description(restores=True, capabilities=CAPABILITIES, axes=AXES),
        profile="quick",
        max_cases=6,
    )
    for item in planned.cases:
        planned.note(item, refused=True)
    assert len(planned.cases) == 6 and not planned.more()


@pytest.mark.parametrize("profile", ["quick", "ci"])
def test_some_checkpoint_is_saved_on_more_than_ten_ranks(profile: str) -> None:
    described = msgspec.structs.replace(RESTORES, resumes=True)
    there = plan(described=described, profile=profile, world_sizes=(), obligations=RESUME)
    assert any("resume-many" in features(case.case) for case in there.cases)


def test_a_case_in_which_nothing_could_fail_is_replaced() -> None:
    there = plan(profile="quick")
    tied = [one for one in there.cases if "tied" in features(one.case)]
    for one in there.cases:
        there.note(one, refused=False, idle=("tied",) if one in tied else ())
    count = len(there.cases)
    assert there.more() and "tied" in features(there.cases[count].case)
    there.note(there.cases[count], refused=False)
    assert not there.more()


def test_a_covering_array_replaces_it_too() -> None:
    there = plan()
    tied = [one for one in there.cases if "tied" in features(one.case)]
    for one in (tied[0], *(one for one in there.cases if one not in tied)):
        there.note(one, refused=False, idle=("tied",) if one in tied else ())
    count = len(there.cases)
    assert there.more() and "tied" in features(there.cases[count].case)
