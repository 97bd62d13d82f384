"""When a rank waits for a collective, with Works that end when the test says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerocheck.compat import work_from_future
from zerocheck.job_metrics.records import CollectiveTimes
from zerocheck.job_metrics.timed_collectives import TimedCollectives

PAUSE = 0.02
"""Seconds."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone, as operators get it."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class _Fake:
    """An operator that does what it is told."""

    def __init__(self, name: str, does: Any, arguments: tuple[str, ...] = ()) -> None:
        self.namespace, _, _ = name.partition("::")
        named = [SimpleNamespace(name=one) for one in arguments]
        self._schema = SimpleNamespace(name=name, arguments=named)
        self._does = does

    def __call__(self, *args: Any) -> Any:
        return self._does()


def traced(group: Any, *, then: Any, within: bool) -> CollectiveTimes:
    """A collective that is over after PAUSE: while the caller is within an operator, or not."""
    over: torch.futures.Future[Any] = torch.futures.Future()
    tensor = torch.zeros(3)
    begins = _Fake(
        "c10d::allreduce_", lambda: ([tensor], work_from_future(over)), ("tensors", "process_group")
    )

    def ends() -> None:
        time.sleep(PAUSE)
        over.set_result([tensor])

    trace = TimedCollectives()
    trace.start()
    trace.called(begins, ([tensor], group), {})
    if within:
        trace.called(_Fake("aten::mm", ends), (), {})
    else:
        ends()
    then()
    (call,), copied = trace.stop(time.monotonic_ns())
    assert (call.kind, call.bytes, call.root) == ("all_reduce", 12, -1) and copied == 0
    assert call.begun <= call.returned <= call.stalled <= call.over
    assert call.over - call.returned >= PAUSE * 1e9
    return call


def test_a_caller_within_an_operator_does_not_wait(group: Any) -> None:
    call = traced(group, then=lambda: None, within=True)
    assert call.stalled == call.over


def test_a_caller_within_none_waits_since_its_last_operator(group: Any) -> None:
    call = traced(group, then=lambda: time.sleep(PAUSE), within=False)
    assert call.over - call.stalled >= PAUSE * 1e9
    assert call.stalled == call.returned


def test_what_is_on_its_way_at_the_end_was_not_waited_for(group: Any) -> None:
    begins = _Fake(
        "c10d::allreduce_",
        lambda: ([torch.zeros(1)], work_from_future(torch.futures.Future())),
        ("tensors", "process_group"),
    )
    trace = TimedCollectives()
    trace.start()
    trace.called(begins, ([torch.zeros(1)], group), {})
    (call,), _ = trace.stop(now := time.monotonic_ns())
    assert call.stalled == call.over == now


def test_real_collectives_and_those_of_functional_operators(group: Any) -> None:
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    trace = TimedCollectives()
    with trace:
        trace.start()
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        work.wait()
        wait_tensor(all_reduce(torch.ones(2), "sum", dist.group.WORLD))
        dist.broadcast(torch.ones(1), src=0)
        time.sleep(PAUSE)
        calls, _ = trace.stop(time.monotonic_ns())
        dist.barrier()  # outside of a step
    assert [(c.kind, c.bytes, c.root) for c in calls] == [
        ("all_reduce", 16, -1),
        ("all_reduce", 8, -1),
        ("broadcast", 4, 0),
    ]
    for call in calls:
        assert 0 < call.begun <= call.returned <= call.stalled <= call.over
        assert call.over - call.begun < 1e9 * 60


def test_collectives_of_an_accelerator_are_not_timed(group: Any) -> None:
    there = torch.zeros(3, device="meta")
    work = work_from_future(torch.futures.Future())
    begins = _Fake("c10d::allreduce_", lambda: ([there], work), ("tensors", "process_group"))
    trace = TimedCollectives()
    trace.start()
    trace.called(begins, ([there], group), {})
    (call,), _ = trace.stop(time.monotonic_ns())
    assert call.begun and not (call.returned or call.stalled or call.over)


def test_copies_between_devices_are_timed(group: Any) -> None:
    trace = TimedCollectives()
    with trace:
        trace.start()
        torch.zeros(3).copy_(torch.ones(3))
        assert trace.stop(time.monotonic_ns())[1] == 0
        trace.start()
        torch.empty(3, device="meta").copy_(torch.ones(3))
        torch.ones(3).to("meta")
        assert trace.stop(time.monotonic_ns())[1] > 0


def test_an_error_of_the_timing_stays_out_of_the_operator(group: Any) -> None:
    """A collective whose arguments are not what the timing knows; its result goes to the caller."""
    odd = _Fake("c10d::novel_", lambda: "the result", ("process_group",))
    trace = TimedCollectives()
    trace.start()
    assert trace.called(odd, (object(),), {}) == "the result"
    assert trace.stop(time.monotonic_ns()) == ((), 0)
