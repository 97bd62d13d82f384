"""Every collective of a rank is collected, in the same words whichever operator carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from adapters.driver import in_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from zerocheck.drive.collective_trace import CallTrace
from zerocheck.protocol.layout import Call

RANKS = 2
Run = Callable[[], object]


def _coalesced() -> None:
    with dist._coalescing_manager(async_ops=False):  # type: ignore[attr-defined]
        dist.all_reduce(torch.zeros(3))
        dist.all_reduce(torch.zeros(5))


def _partial() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(torch.zeros(6), mesh, [Partial()]).full_tensor()


def _parts(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for _ in range(dist.get_world_size())]


CALLED: dict[str, tuple[Run, tuple[str, int, str]]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.zeros(3, 2)), ("all_reduce", 24, "float32")),
    "all_reduce of bf16": (
        lambda: dist.all_reduce(torch.zeros(3, dtype=torch.bfloat16)),
        ("all_reduce", 6, "bfloat16"),
    ),
    "all_gather": (
        lambda: dist.all_gather(_parts(4), torch.zeros(4)),
        ("all_gather", 32, "float32"),
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(4)),
        ("all_gather", 32, "float32"),
    ),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(torch.zeros(4), 0, dist.group.WORLD).sum(),
        ("all_gather", 32, "float32"),
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.zeros(4), _parts(4)),
        ("reduce_scatter", 32, "float32"),
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8)),
        ("reduce_scatter", 32, "float32"),
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(torch.zeros(8), "sum", 0, dist.group.WORLD).sum(),
        ("reduce_scatter", 32, "float32"),
    ),
    "broadcast": (
        lambda: dist.broadcast(torch.zeros(3, dtype=torch.int64), 0),
        ("broadcast", 24, "int64"),
    ),
    "reduce": (lambda: dist.reduce(torch.zeros(3), 1), ("reduce", 12, "float32")),
    "all_to_all": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4)),
        ("all_to_all", 16, "float32"),
    ),
    "scatter": (
        lambda: dist.scatter(torch.zeros(3), _parts(3) if dist.get_rank() == 0 else None, src=0),
        ("scatter", 24, "float32"),
    ),
    "gather": (
        lambda: dist.gather(torch.zeros(3), _parts(3) if dist.get_rank() == 0 else None, dst=0),
        ("gather", 24, "float32"),
    ),
    "barrier": (lambda: dist.barrier(), ("barrier", 0, "")),
    "empty": (lambda: dist.all_reduce(torch.zeros(0)), ("all_reduce", 0, "float32")),
    "partial DTensor": (_partial, ("all_reduce", 24, "float32")),
}


def _traced(_: DeviceMesh, name: str) -> list[Call]:
    run = CALLED[name][0]
    with CallTrace(lambda: (3, "backward")) as trace:
        run()
    return trace.calls


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLED)
def test_kinds_and_bytes(name: str) -> None:
    kind, size, dtype = CALLED[name][1]
    wanted = [Call(kind, size, RANKS, dtype, "backward", 3)]
    assert in_ranks(RANKS, _traced, name) == [wanted] * RANKS


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_no_part_of_a_step_is_left_out(alone: None) -> None:
    place: tuple[int, Any] | None = None
    with CallTrace(lambda: place) as trace:
        dist.all_reduce(torch.zeros(1))
        place = 0, "forward"
        dist.all_reduce(torch.zeros(2))
        torch.zeros(2) + 1
        place = None
        dist.all_reduce(torch.zeros(3))
        place = 1, "step"
        dist.broadcast(torch.zeros(4), 0)
    assert trace.calls == [
        Call("all_reduce", 8, 1, "float32", "forward", 0),
        Call("broadcast", 16, 1, "float32", "step", 1),
    ]


def test_a_coalesced_call_is_one(alone: None) -> None:
    with CallTrace(lambda: (0, "step")) as trace:
        _coalesced()
    assert sum(call.bytes for call in trace.calls) == 32
