"""What the rivals say: of the reference itself, and of what is off by a little in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Model, Start, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.judge.free_run import Trajectory, trajectory
from zerocheck.kill_matrix.baselines import LOSS_RTOL, all_agree, compare, usual_start
from zerocheck.protocol.observations import Entry, RankObservation, Recorded, StepObservation
from zerocheck.run.execute.free_runs import STEPS, free_run_case
from zerocheck.run.records.matrix_records import Rivals

CASE = Case(
    model=Model(blocks=(Block(kind="mlp", dtype="bf16"),)),
    training=Training(steps=3, microbatches=2),
)


@dataclass
class Hand:
    """Two ranks that show what the reference has: everything on each, or a half on each."""

    reference: Trajectory
    halves: bool
    parameters: list[dict[str, torch.Tensor]]
    losses: list[list[tuple[float, ...]]]

    def rivals(self) -> Rivals:
        seen, data = [], {}
        for rank, own in enumerate(self.parameters):
            entries = []
            for name, value in own.items():
                shape = tuple(self.reference.parameters[name].shape)
                count = math.prod(shape)
                start, stop = 0, count
                if self.halves:
                    start, stop = (count // 2 * rank, count // 2 if rank == 0 else count)
                entries.append(Entry(name, shape, start, stop))
                assert value.numel() == stop - start
            last = CASE.training.steps - 1
            flat = torch.cat([value.float() for value in own.values()])
            record = Recorded(last, "state", "parameter", 0, 0, flat.numel(), "float32")
            data[rank] = flat
            seen.append(
                RankObservation(
                    manifests=(tuple(entries),),
                    records=(record,),
                    steps=tuple(StepObservation(losses) for losses in self.losses[rank]),
                )
            )
        return compare(CASE, seen, lambda rank, record: data[rank], self.reference)


@pytest.fixture(scope="module")
def reference() -> Trajectory:
    return trajectory(CASE, Semantics(), restored=False)


@pytest.fixture(params=[False, True], ids=["replicated", "sharded"])
def hand(request: pytest.FixtureRequest, reference: Trajectory) -> Hand:
    parameters = []
    for rank in range(2):
        own = {}
        for name, value in reference.parameters.items():
            flat = value.reshape(-1).clone()
            half = flat.numel() // 2
            own[name] = (flat[:half] if rank == 0 else flat[half:]) if request.param else flat
        parameters.append(own)
    losses = [[(loss, loss) for loss in reference.losses] for _ in range(2)]
    return Hand(reference, request.param, parameters, losses)


def test_they_are_quiet_where_all_is_the_same(hand: Hand) -> None:
    found = hand.rivals()
    assert found == Rivals(outcome="finished")
    assert not found.loss_alarm and not found.parameter_alarm


@pytest.mark.parametrize(("far", "alarm"), [(0.5, False), (2.0, True)])
def test_the_loss_curve_is_a_mean_over_ranks_and_microbatches(
    hand: Hand, far: float, alarm: bool
) -> None:
    loss = hand.reference.losses[1]
    hand.losses[1][1] = (loss, loss * (1 + 4 * far * LOSS_RTOL))  # one of four
    found = hand.rivals()
    assert found.loss_step == (1 if alarm else None)
    assert found.loss_deviation == pytest.approx(far * LOSS_RTOL, rel=1e-3)
    assert not found.parameter_alarm


@pytest.mark.parametrize("losses", [(), (math.nan, 1.0), (math.inf, 1.0)])
def test_a_loss_that_is_none_is_an_alarm(hand: Hand, losses: tuple[float, ...]) -> None:
    for rank in range(2):
        hand.losses[rank][2] = losses
    assert hand.rivals().loss_step == 2


def test_parameters_are_refused_by_their_own_tolerance(hand: Hand) -> None:
    """1e-3 is within the tolerance of bf16, and far outside of that of fp32."""
    hand.parameters[1]["head.weight"][-1] += 1e-3
    hand.parameters[1]["blocks.0.up.weight"][-1] *= 1 + 2**-7
    found = hand.rivals()
    assert found.refused == ("head.weight",)
    assert found.parameter_alarm and not found.loss_alarm


def test_memory_that_nobody_wrote_is_an_alarm(hand: Hand) -> None:
    hand.parameters[0]["stem.bias"][0] = math.nan
    found = hand.rivals()
    assert found.refused == ("stem.bias",) and found.deviation == math.inf


def test_a_shard_that_nobody_holds_is_an_alarm(hand: Hand) -> None:
    del hand.parameters[1]["stem.weight"]
    if not hand.halves:
        del hand.parameters[0]["stem.weight"]
    assert hand.rivals().refused == ("stem.weight",)


def test_names_that_the_model_does_not_have_are_an_alarm(hand: Hand) -> None:
    for own in hand.parameters:
        own["stam.bias"] = own.pop("stem.bias")
    hand.reference = Trajectory(
        hand.reference.losses,
        {**hand.reference.parameters, "stam.bias": hand.reference.parameters["stem.bias"]},
    )
    assert len(hand.rivals().refused) == len(hand.reference.parameters)


def test_an_alarm_is_one_by_every_reading() -> None:
    """A reading in which an unused parameter decays, and one in which it does not."""
    zero = Rivals(outcome="finished", loss_step=2, refused=("spare", "side"), deviation=2.0)
    skip = Rivals(outcome="finished", refused=("side", "head"), deviation=1.0)
    assert all_agree([zero]) == zero
    assert all_agree([zero, skip]) == Rivals(outcome="finished", refused=("side",), deviation=1.0)
    assert all_agree([zero, zero]) == zero


def test_free_cases_have_more_steps_unless_their_number_is_fixed() -> None:
    assert free_run_case(CASE, {}).training == replace(CASE.training, steps=STEPS)
    assert free_run_case(CASE, {"training": {"clip": None}}).training.steps == STEPS
    assert free_run_case(CASE, {"training": {"steps": 3}}) == CASE


def test_a_usual_start_is_step_0_with_the_loss_as_it_is() -> None:
    case = replace(
        CASE,
        start=Start(step=255, moments="huge", zeros=("head.*",)),
        data=Data(loss_factor=1e-4, batch=3),
        training=Training(clip=1e-6),
    )
    usual = usual_start(case, {})
    assert usual.start == Start(zeros=("head.*",)) and usual.data == Data(batch=3)
    assert usual.training == Training(clip=1e-6 / 1e-4)
    assert replace(usual, start=case.start, data=case.data, training=case.training) == case
    assert usual_start(CASE, {}) == CASE
    fixed = usual_start(case, {"start": {"step": 255}, "data": {"loss_factor": 1e-4}})
    assert fixed == case


@pytest.mark.parametrize("outcome", ["crashed", "hung"])
def test_what_breaks_is_seen_by_both(outcome: str) -> None:
    broken = Rivals(outcome=outcome)  # type: ignore[arg-type]
    assert broken.ran and broken.loss_alarm and broken.parameter_alarm
    assert not Rivals(outcome="unsupported").ran
