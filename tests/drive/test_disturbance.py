"""Delays, and random numbers that are carried on."""

from __future__ import annotations

import time

import torch

from zerocheck.case.schema import Case, Data, Disturbance
from zerocheck.drive.delays import Delays
from zerocheck.drive.randomness import CarriedRandomness


def test_optimizer_steps_are_delayed_within_it_only() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter])
    delays = Delays(Case(disturbance=Disturbance(delay=40.0)), rank=0)
    paused: list[int] = []
    delays.pause = lambda *_: paused.append(1)  # type: ignore[method-assign]
    optimizer.step()
    assert not paused
    with delays.everywhere():
        optimizer.step()
    optimizer.step()
    assert len(paused) == 1


def test_ranks_are_delayed_differently_and_a_case_without_delays_is_not() -> None:
    def taken(rank: int, delay: float) -> list[float]:
        delays = Delays(Case(seed=3, disturbance=Disturbance(delay=delay)), rank)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            delays.pause()
            times.append(time.perf_counter() - begin)
        return times

    assert sum(taken(0, 0.0)) < 1e-2
    assert sum(taken(0, 30.0)) > 1e-3
    one, other = (Delays(Case(seed=3), rank)._random.random() for rank in (0, 1))
    assert one != other


def test_states_are_noted_where_a_loss_is_entered_and_kept_once() -> None:
    before = torch.get_rng_state()
    try:
        carried = CarriedRandomness(Case(data=Data(rng="carried")), rank=1)
        carried.start()
        carried.note()
        carried.note()
        torch.rand(3)
        carried.note()
        assert carried.taken() == (0, 0, 1)
        assert carried.taken() == ()
        carried.start()
        state = torch.get_rng_state().numpy().tobytes()
        assert carried.states[0] == state != carried.states[1]
        other = CarriedRandomness(Case(data=Data(rng="carried")), rank=2)
        other.start()
        other.note()
        assert other.states[0] != state
        seeded = CarriedRandomness(Case(), rank=1)
        here = torch.get_rng_state()
        seeded.start()
        seeded.note()
        assert seeded.taken() == () and torch.equal(here, torch.get_rng_state())
    finally:
        torch.set_rng_state(before)
