"""Provenance of loaded, saved and exported state: counts, buffers, numbers, and whole cases."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from zerocheck import causes as bugs
from zerocheck.case.schema import Block, Case, Model, Training, TrainingSegment
from zerocheck.causes.registry import find
from zerocheck.contract.start import scramble
from zerocheck.judge.attribution.carried import (
    data_position,
    loaded_buffers,
    loss_scale,
    random_states,
)
from zerocheck.judge.attribution.counts import step_counts
from zerocheck.judge.attribution.facts import Fact, Facts
from zerocheck.judge.attribution.forwards import OtherParameters, computed_with
from zerocheck.judge.attribution.places import Where
from zerocheck.judge.diagnose.loss import equal as equal_losses
from zerocheck.judge.diagnose.named import without_names
from zerocheck.judge.layout import ParameterLayout
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import Violation
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

MLP = Model(blocks=(Block(kind="mlp"), Block(kind="batch_norm")))
CASE = Case(mesh=(2,), model=MLP, training=Training(steps=2))
RESUMED = Case(
    mesh=(2,), model=MLP, training=Training(steps=2), resume=(TrainingSegment(mesh=(2,), steps=1),)
)


def matches(cause: str, attribution: str) -> bool:
    found = find(cause)
    assert found is not None and found.attributed
    return re.search(found.attributed, attribution) is not None


@pytest.mark.parametrize(
    ("has", "words", "cause"),
    [
        (0.0, "is 0, 3 was saved", bugs.STEP_COUNT_LOST),
        (2.0, "is 2, one less, 3 was saved", bugs.STEP_COUNT_OF_AN_EARLIER_STEP),
        (4.0, "is 4, one more, 3 was saved", bugs.OPTIMIZER_STEPPED_BY_THE_LOAD),
        (
            1.0,
            "is 1, that after step 0, 2 steps earlier, 3 was saved",
            bugs.STEP_COUNT_OF_AN_EARLIER_STEP,
        ),
        (None, "is not the same on all ranks, 3 was saved", None),
    ],
)
def test_step_counts(has: float | None, words: str, cause: str | None) -> None:
    layout = ParameterLayout.of(build_model(CASE), CASE)
    count = len(layout.places)
    others = {0: [1.0] * count, 1: [2.0] * count}
    facts = step_counts([has] * count, [3.0] * count, layout, others, 2, "was saved")
    assert facts.sentence() == f"the step count of every parameter {words}"
    of = (
        bugs.STEP_COUNT_LOST,
        bugs.STEP_COUNT_OF_AN_EARLIER_STEP,
        bugs.OPTIMIZER_STEPPED_BY_THE_LOAD,
    )
    assert [one for one in of if matches(one, facts.sentence())] == ([cause] if cause else [])


def test_a_rounded_step_count() -> None:
    layout = ParameterLayout.of(build_model(CASE), CASE)
    count = len(layout.places)
    facts = step_counts([260.0] * count, [259.0 + 2] * count, layout, {}, 2, "was saved")
    assert "is 260, one less" in facts.sentence()
    facts = step_counts([1024.0] * count, [1027.0] * count, layout, {}, 2, "was saved")
    assert "is 1024, 1027 rounded to bf16, 1027 was saved" in facts.sentence()


def test_buffers() -> None:
    model = build_model(RESUMED)
    saved = {name: buffer.clone() + 0.3 for name, buffer in model.named_buffers()}
    scramble(model, RESUMED)
    fresh = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert saved and loaded_buffers([saved], [saved], RESUMED) == ""
    words = loaded_buffers([fresh, saved], [saved, saved], RESUMED)
    assert words == "on rank 0, every buffer is that of the model before the load"
    rounded = {name: one.bfloat16().to(one.dtype) for name, one in saved.items()}
    words = loaded_buffers([rounded], [saved], RESUMED)
    assert "the saved one rounded to bf16" in words


@pytest.mark.parametrize(
    ("given", "ranks", "words", "cause"),
    [
        ([0, 0], 2, "the data position is 0 samples, 48 were read", bugs.DATA_POSITION_LOST),
        (
            [12, 12],
            2,
            "the data position is 12 samples (48 divided by 4, the number of ranks that saved), "
            "48 were read",
            bugs.DATA_POSITION_OF_ONE_RANK,
        ),
        (
            [48, 36],
            3,
            "the data position on rank 1 is 36 samples (as many steps with 3 ranks, not 4), "
            "48 were read",
            bugs.DATA_POSITION_COUNTED_IN_STEPS,
        ),
        ([47, 47], 2, "the data position is 47 samples, one less, 48 were read", None),
        ([17, 17], 2, "the data position is 17 samples, 48 were read", None),
    ],
)
def test_data_positions(given: list[int], ranks: int, words: str, cause: str | None) -> None:
    assert data_position(given, 48, 4, ranks) == words
    of = (
        bugs.DATA_POSITION_LOST,
        bugs.DATA_POSITION_OF_ONE_RANK,
        bugs.DATA_POSITION_COUNTED_IN_STEPS,
    )
    assert [one for one in of if matches(one, words)] == ([cause] if cause else [])


def test_random_states() -> None:
    saved = [b"0", b"1", b"2"]
    words = random_states([b"0", b"0", b"0"], saved)
    assert words == "ranks 1 and 2 have the random state that rank 0 saved"
    assert matches(bugs.RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS, words)
    words = random_states([b"0", b"2", b"9"], saved)
    assert words == (
        "rank 1 has the random state that rank 2 saved; rank 2 has a random state that no rank "
        "saved"
    )
    assert not matches(bugs.RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS, words)


def test_loss_scales() -> None:
    assert loss_scale([8.0, 8.0], 2.0, 8.0) == (
        "the loss scale is 8, that of the first step, 2 was saved"
    )
    assert (
        loss_scale([2.0, 1.0], 2.0, 8.0) == "the loss scale on rank 1 is 1, 1/2 of it, 2 was saved"
    )


def test_facts_are_merged_over_roles_and_ranks() -> None:
    every = Where("every parameter", False)
    one = Fact("exp_avg", every, "is 0", "are 0", 4, (0,))
    both = [one, one._replace(role="exp_avg_sq")]
    on = [fact._replace(ranks=(rank,)) for rank in (0, 1) for fact in both]
    assert Facts(tuple(both), 0, 8).sentence(3) == (
        "on rank 0, exp_avg and exp_avg_sq of every parameter are 0"
    )
    assert Facts(tuple(on), 0, 16).sentence(2) == (
        "on every rank, exp_avg and exp_avg_sq of every parameter are 0"
    )
    others = [
        one._replace(
            where=Where(f"the shard of rank {1 - rank}", False, (1 - rank,)), ranks=(rank,)
        )
        for rank in (0, 1)
    ]
    assert Facts(tuple(others), 0, 8).sentence(2) == (
        "on every rank, exp_avg in the shards of all other ranks is 0"
    )


def test_losses_of_other_parameters() -> None:
    """Each rank has its own parameters; those that no loss gives away are counted."""

    def replay(parameters: object) -> list[list[float]]:
        return [[float(one.sum())] for one in parameters]  # type: ignore[attr-defined]

    def same(one: float, other: float) -> bool:
        return one == other

    right, old = torch.ones(2), torch.zeros(2)
    others = [OtherParameters("the parameters of the step before", [old, old, old])]

    def words(observed: list[list[float]]) -> str:
        return computed_with(observed, [[2.0]] * 3, iter(others), replay, same)

    assert float(right.sum()) == 2.0
    assert words([[0.0], [0.0], [0.0]]) == (
        "every rank computes with the parameters of the step before"
    )
    assert words([[2.0], [2.0], [0.0]]) == (
        "rank 2 computes with the parameters of the step before"
    )
    assert words([[0.0], [2.0], [7.0]]) == (
        "rank 0 computes with the parameters of the step before; the losses of 1 of 2 ranks "
        "remain unexplained"
    )
    assert words([[7.0], [7.0], [7.0]]) == ""

    def within(tolerance: float) -> str:
        losses = [[0.001], [2.0], [2.0]]
        equal = partial(equal_losses, tolerance=tolerance)
        return computed_with(losses, [[2.0]] * 3, iter(others), replay, equal, tolerance)

    assert within(0.0015) == "rank 0 computes with the parameters of the step before"
    assert within(0.0025) == ""  # one in 800 fits by chance
    assert matches(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, words([[0.0], [0.0], [0.0]]))


def violated(pool: Pool, fault: str, case: Case, obligation: str) -> Violation:
    judgement = Trial(pool, f"zerocheck.faults.{fault}", case).outcome().judgement
    assert judgement is not None
    (found,) = [one for one in judgement.violations if one.obligation == obligation]
    return found


FAULTS = [
    (
        "ownership:PublishedRounded",
        CASE,
        "publish",
        bugs.COPIES_ROUNDED_TO_BF16,
        "on every rank, the parameters in the shards of all other ranks are the owners' rounded "
        "to bf16",
    ),
    (
        "ownership:GatherStale",
        CASE,
        "publish",
        bugs.PARAMETERS_OF_THE_PREVIOUS_STEP,
        "every rank computes with the parameters of the step before",
    ),
    (
        "checkpoints:ExportRounded",
        RESUMED,
        "export",
        bugs.ROUNDED_TO_BF16,
        "in the export, on every rank, every parameter is the one that the shards hold rounded to "
        "bf16",
    ),
    (
        "checkpoints:SavedMomentsSwapped",
        RESUMED,
        "roundtrip",
        bugs.MOMENTS_SWAPPED,
        "exp_avg of every parameter holds exp_avg_sq of the same elements; exp_avg_sq of every "
        "parameter holds exp_avg of the same elements",
    ),
]


@pytest.mark.parametrize(("fault", "case", "obligation", "cause", "words"), FAULTS)
def test_whole_cases(
    pool: Pool, fault: str, case: Case, obligation: str, cause: str, words: str
) -> None:
    """A fault is attributed, in the words of its cause, with the list of known causes or not."""
    found = violated(pool, fault, case, obligation)
    assert cause in found.causes and found.attribution == words and matches(cause, words)
    with without_names():
        unnamed = violated(pool, fault, case, obligation)
    assert (unnamed.causes, unnamed.attribution) == ((), words)
    assert unnamed.explanation in found.explanation or fault.endswith("GatherStale")


@pytest.mark.parametrize("case", [CASE, RESUMED])
def test_a_case_that_holds_looks_nothing_up(
    pool: Pool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("looked up")

    for name in ("loaded.provenance", "copies.provenance", "carried.provenance"):
        monkeypatch.setattr(f"zerocheck.judge.attribution.{name}", forbidden)
    outcome = Trial(pool, "zero1", case).outcome()
    assert outcome.status == "holds"
    assert "looked up" in violated(pool, *FAULTS[0][:3]).attribution
