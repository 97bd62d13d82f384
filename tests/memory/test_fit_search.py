"""What the search says fits, against the simulation of every choice on every number of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from reserving import exactly
from slices import WHOLE, sliced

from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.bounds import lower_bound, model_bytes
from zerocheck.memory.fit.choices import Choice, Restriction, meshes
from zerocheck.memory.fit.recommend import words_of
from zerocheck.memory.fit.result import FitReport
from zerocheck.memory.fit.search import FitSearch, numbers_of_ranks
from zerocheck.memory.setup import AxisSizes, Setup
from zerocheck.memory.source import source
from zerocheck.memory.verdict import CUDA_CONTEXT, Reserved, room

pytestmark = pytest.mark.usefixtures("simulated_once", "nothing_rounded")

MOST = 4
RANKS = numbers_of_ranks(MOST)
LIMITS = tuple(
    CUDA_CONTEXT + size
    for size in sliced(
        (250_000, 330_000, 420_000, 520_000, 700_000, 1_200_000), (250_000, 420_000, 1_200_000)
    )
)
"""From what nothing fits into to what everything does."""
ASKED = sliced(Restriction(offload="none"), Restriction(wrap="block", offload="none"))
"""Offloading is searched in test_offloaded.py."""


def small(**more: object) -> Setup:
    options = {"batch": 2 if WHOLE else 1, "sequence": 29, "precision": "fp32", **more}
    return Setup(model="small_models:small", **options)  # type: ignore[arg-type]


def search(limit: int, base: Setup | None = None) -> FitSearch:
    base = base or small()
    return FitSearch(base, source(base.model), limit, RANKS, given_ranks=True)


@cache
def everything() -> FitSearch:
    """All choices on all numbers of ranks, simulated; the limit is of no matter."""
    found = search(1)
    for choice in found.all_choices(ASKED):
        for ranks in filter(choice.runs_on, RANKS):
            found.point(choice, ranks)
    return found


RESERVED = FitSearch.reserved


@cache
def searched(limit: int) -> FitReport:
    return fit(small(), limit, most_ranks=MOST, restriction=ASKED)


def by_all(limit: int) -> FitReport:
    """The report of an exhaustive search, without simulating everything again."""
    points = everything().points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FitSearch, "point", lambda _, choice, ranks: points[choice, ranks])
        return fit(small(), limit, most_ranks=MOST, restriction=ASKED, exhaustive=True)


def answers(report: FitReport) -> list[tuple[object, ...]]:
    """All that must not depend on how it was searched."""
    rows = [(row.command, row.smallest, row.peak, row.sent, row.calls) for row in report.rows]
    return [*rows, report.taken, report.advice[:1], report.verdict, report.exit_code]


@pytest.mark.every(3)
@pytest.mark.parametrize("limit", LIMITS)
def test_the_search_says_what_all_simulations_say(limit: int) -> None:
    found, every = searched(limit), by_all(limit)
    assert answers(found) == answers(every)
    assert every.by_formula == every.by_update == 0


def test_it_spares_simulations_and_the_limits_tell_choices_apart() -> None:
    spared = [len(everything().points) - searched(limit).simulations for limit in LIMITS]
    assert all(count > 0 for count in spared)
    assert any(searched(limit).by_formula for limit in LIMITS)
    assert any(searched(limit).by_update for limit in LIMITS)
    assert len({str(answers(searched(limit))) for limit in LIMITS}) == len(LIMITS)
    assert searched(LIMITS[0]).exit_code == 1 and searched(LIMITS[-1]).exit_code == 0


def test_no_peak_is_under_its_bound() -> None:
    found = everything()
    for (choice, ranks), point in found.points.items():
        bound = sum(found.bound(choice, ranks).values())
        assert 0 < bound <= point.peak.total, (choice, ranks)


def test_the_optimizer_step_does_not_depend_on_what_is_not_sharded() -> None:
    """It bounds the peak of choices that were not simulated."""
    updates: dict[tuple[str, int, int, int], set[int]] = {}
    for (choice, ranks), point in everything().points.items():
        key = choice.implementation, choice.microbatches, choice.axes, ranks
        updates.setdefault(key, set()).add(point.update.total)
    assert {key: sizes for key, sizes in updates.items() if len(sizes) > 1} == {}


def test_each_choice_fits_on_more_ranks_too() -> None:
    """Peaks shrink with ranks; with one rank alone nothing is gathered."""
    for choice in everything().all_choices(ASKED):
        more = filter(choice.runs_on, RANKS[1:])
        peaks = [everything().points[choice, ranks].peak.total for ranks in more]
        assert peaks == sorted(peaks, reverse=True), choice


def test_replicas_are_tried_on_given_ranks_where_they_send_less() -> None:
    """R replicas of S ranks: 3 (S - 1)/S + 2 (R - 1)/(R S) of Psi, and 3 (N - 1)/N over all."""
    report = searched(LIMITS[-1])
    rows = {
        (row.replicas, row.checkpoint_activations): row
        for row in report.rows
        if row.implementation == "fsdp2" and row.reshard and row.wrap == "block"
    }
    assert {replicas for replicas, _ in rows} == {1, 2}
    over_all, replicated = rows[1, False], rows[2, False]
    assert replicated.sent < over_all.sent and replicated.peak.total > over_all.peak.total
    assert replicated.calls > over_all.calls and "--replicas 2" in replicated.command
    assert "HSDP of 2 replicas" in words_of(replicated)
    assert {row.replicas for row in report.rows if row.stage in (0, 1, 2)} == {1}
    assert not [line for line in report.not_tried if "HSDP" in line]


def test_replicas_are_not_tried_where_the_fewest_ranks_are_asked_for() -> None:
    assert meshes("fsdp2", 0, None) == (1,)
    assert meshes("fsdp2", 12, None) == (4, 2, 1)
    assert meshes("fsdp2", 12, 3) == (3,)
    assert meshes("ddp", 12, 3) == () and meshes("ddp", 12, None) == (1,)
    assert meshes("zero2", 12, None) == (1,) and meshes("zero2", 12, 2) == (2,)
    choice = Choice("fsdp2", "block", True, False, 1, AxisSizes(3))
    assert [ranks for ranks in range(1, 13) if choice.runs_on(ranks)] == [6, 9, 12]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp2"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_from_the_second_on_each_microbatch_is_as_the_one_before(
    name: str, checkpoint: bool
) -> None:
    choice = Choice(name, "block", True, checkpoint, 4)
    base = small(batch=4)
    found = search(1, base).point(choice, 3)
    all_four = run(choice.setup(base, 3), source(base.model))
    assert found.peak == all_four.timeline.peak()
    assert found.traffic == all_four.traffic


def test_frozen_parameters_have_no_gradient_in_the_bound() -> None:
    model = source("small_models:small").build()
    whole = model_bytes(model)
    for parameter in list(model.parameters())[:4]:
        parameter.requires_grad_(False)
    frozen = model_bytes(model)
    setup = replace(small(), implementation="fsdp2", world_size=4)
    all_of_it, some = lower_bound(setup, whole), lower_bound(setup, frozen)
    assert all_of_it["parameters"] == some["parameters"]
    assert all_of_it["gradients"] > some["gradients"]
    assert sum(all_of_it.values()) == 16 * whole.elements // 4


def test_what_is_given_is_kept() -> None:
    given = Restriction(implementation="fsdp2", checkpoint=True, reshard=False, replicas=1)
    report = fit(small(), 10**9, most_ranks=4, restriction=given)
    (row,) = report.rows
    assert (row.implementation, row.checkpoint_activations, row.reshard) == ("fsdp2", True, False)
    assert row.smallest == 1 and row.ranks == 4


@pytest.mark.long
def test_the_command_of_a_row_simulates_its_peak() -> None:
    base = small(batch=2)
    report = fit(
        base, CUDA_CONTEXT + 500_000, most_ranks=2, restriction=Restriction(implementation="fsdp2")
    )
    words = {row.command for row in report.rows}
    assert any("--microbatches" in command for command in words)
    row = next(row for row in report.rows if row.microbatches > 1)
    setup = Choice(
        row.implementation, row.wrap, row.reshard, row.checkpoint_activations, row.microbatches  # type: ignore[arg-type]
    ).setup(base, row.ranks)  # fmt: skip
    assert setup.command() == row.command
    assert analyse(setup).peak == row.peak


@pytest.mark.long
def test_stages_that_give_matrices_to_ranks_are_not_searched() -> None:
    base = small(optimizer="muon")
    found = search(1, base)
    assert {one.implementation for one in found.all_choices(Restriction())} == {"ddp", "fsdp2"}
    given = found.all_choices(Restriction(implementation="zero1"))
    assert {one.implementation for one in given} == {"zero1"}
    report = fit(base, CUDA_CONTEXT + 1_200_000, most_ranks=1)
    assert any("zero1 and zero2 with muon" in words for words in report.not_tried)


def test_the_row_to_take_is_one_whose_reserved_memory_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the cheapest, if the allocator's roundings make that one too large."""
    asked: list[tuple[Choice, int]] = []

    def reserved(self: FitSearch, choice: Choice, ranks: int) -> tuple[Reserved, str]:
        asked.append((choice, ranks))
        return exactly(room(self.limit) + (len(asked) < 3)), ""

    found = searched(LIMITS[-1])
    monkeypatch.setattr(FitSearch, "reserved", reserved)
    later = fit(small(), LIMITS[-1], most_ranks=MOST, restriction=ASKED)
    assert len({*asked}) == 3 and sum("would reserve" in line for line in later.advice) == 2
    commands = [row.command for row in found.rows]
    assert found.rows[found.taken].command == commands.pop(found.taken)
    assert later.rows[later.taken].command in commands
    gone = {choice.setup(small(), ranks).command() for choice, ranks in asked[:2]}
    assert gone <= {row.command for row in found.rows}
    assert not gone & {row.command for row in later.rows}
    # What they replaced is searched: with checkpointing less is reserved.
    again = [row for row in later.rows if row.checkpoint_activations]
    assert again and not [row for row in found.rows if row.checkpoint_activations]


@pytest.mark.long
def test_what_is_too_large_is_tried_on_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved(self: FitSearch, choice: Choice, ranks: int) -> tuple[Reserved, str]:
        return exactly(room(self.limit) + (ranks < 4)), ""

    monkeypatch.setattr("zerocheck.memory.fit.assemble.MOST_RANKS", MOST)
    restriction = Restriction(implementation="fsdp2", checkpoint=False)
    before = fit(small(), LIMITS[-1], restriction=restriction)
    first = before.rows[before.taken]
    assert first.ranks == 1 and first.reserved is not None
    monkeypatch.setattr(FitSearch, "reserved", reserved)
    after = fit(small(), LIMITS[-1], restriction=restriction)
    row = after.rows[after.taken]
    assert row.smallest == row.ranks == 4 and row.reserved is not None
    assert after.advice[0].startswith("take fsdp2") and " on 4 ranks" in after.advice[0]


def test_what_is_reserved_is_that_of_the_command() -> None:
    """And so is the verdict: on the setup of a row it is that of the search."""
    choice = Choice("zero2", "block", True, False, 1)
    held, reason = RESERVED(search(1), choice, 2)
    assert held is not None and held.default > 64 << 20 and not reason
    setup = choice.setup(small(), 2)
    for size in (held.default, held.default - 1, held.expandable, held.expandable - 1):
        limit = CUDA_CONTEXT + size
        device = analyse(setup, limit=limit).device
        assert device is not None and device.verdict.reserved == held
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FitSearch, "reserved", lambda *_: (held, ""))
            kept = replace(ASKED, implementation="zero2", checkpoint=False)
            report = fit(small(), limit, most_ranks=2, restriction=kept)
        assert bool(report.rows) == device.verdict.fits
        assert report.verdict == (device.verdict if device.verdict.fits else None)


def test_a_rank_other_than_the_first_is_refused() -> None:
    with pytest.raises(UsageError, match="--fit counts rank 0"):
        fit(small(rank=1, world_size=4), 10**9, most_ranks=4)


def test_numbers_of_ranks() -> None:
    assert numbers_of_ranks(1) == (1,)
    assert numbers_of_ranks(6) == (1, 2, 4, 6)
    assert numbers_of_ranks(8) == (1, 2, 4, 8)
