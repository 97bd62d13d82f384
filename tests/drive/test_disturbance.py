"""Delays, and random numbers that are carried on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zerocheck.case.schema import Case, Data, Disturbance
from zerocheck.compat import all_gather_single
from zerocheck.drive.collectives import CollectiveTrace
from zerocheck.drive.delays import Delays, LateCollectives
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


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Late(Delays):
    """Every collective is late, the first one by 60 ms, and the caller goes on."""

    def __init__(self) -> None:
        super().__init__(Case(disturbance=Disturbance(delay=60.0)), rank=0)
        self.left = 0.06

    def drawn(self) -> float:
        seconds, self.left = self.left, 0.0
        return seconds

    def heads(self) -> bool:
        return False


def test_an_asynchronous_collective_begins_late_and_its_work_is_over_after_it(
    one_rank: None,
) -> None:
    noted: list[str] = []
    begin = time.perf_counter()
    with _Late().everywhere(), CollectiveTrace(lambda name, _: noted.append(name)):
        given, got = torch.tensor([1.0]), torch.zeros(1)
        work = all_gather_single(got, given, dist.group.WORLD)
        assert noted == ["_allgather_base(1)"]  # where it is called
        assert time.perf_counter() - begin < 0.05 and got.tolist() == [0.0]
        given.fill_(2.0)  # too early: it is not sent yet
        second = torch.tensor([5.0])
        other = dist.all_reduce(second, async_op=True)
        assert work is not None and other is not None
        work.wait()
        assert time.perf_counter() - begin >= 0.06 and got.tolist() == [2.0]
        other.wait()
        dist.barrier()
    assert noted == ["_allgather_base(1)", "allreduce(1)", "barrier"]
    assert second.tolist() == [5.0]


def test_what_fails_in_a_late_collective_is_raised(one_rank: None) -> None:
    def wrong() -> None:
        with _Late().everywhere():
            work = dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.BAND, async_op=True)
            assert work is not None
            work.wait()

    with pytest.raises(RuntimeError):
        wrong()


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
        other = CarriedRandomness(Case(data=Data(rng="carried")), rank=0)
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


def test_on_a_gpu_a_late_collective_is_called_where_its_caller_waits() -> None:
    """A Work of a GPU is waited for on the stream of the thread that waits: another thread's would
    let the caller go on too soon. The meta device stands for it."""
    delays = Delays(Case(disturbance=Disturbance(delay=1.0)), rank=0)
    delays.heads = lambda: False  # type: ignore[method-assign]
    late = LateCollectives(delays)
    threads: list[int] = []

    def collective(*_: object) -> tuple[None, str]:
        threads.append(threading.get_ident())
        return None, "a Work"

    collective.namespace = "c10d"  # type: ignore[attr-defined]
    group = SimpleNamespace(name="process_group")
    collective._schema = SimpleNamespace(arguments=[group], returns=[0, 0])  # type: ignore[attr-defined]
    there = [torch.empty(2, device="meta")]
    assert late.called(collective, [there], {}) == (None, "a Work")
    assert threads == [threading.get_ident()]
    late.finish()
