"""A thousand cases run in one process: nothing stays behind."""

from __future__ import annotations

import ctypes
import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1GradOp, Fsdp1NoShard
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.adapters.zero_redundancy.adapter import ZeroRedundancy
from zerocheck.case.schema import Block, Case, Model, Precision, TrainingSegment
from zerocheck.contract import BuiltImplementation, Implementation
from zerocheck.models.network import build_model

from .cases import CASES, on
from .driver import in_ranks, step_of

KINDS: list[type[Implementation]] = [
    Ddp,
    ZeroRedundancy,
    Zero1,
    Zero2,
    Zero3,
    Fsdp1,
    Fsdp1GradOp,
    Fsdp1NoShard,
    Fsdp2,
]
GROWING = sliced(KINDS, [Zero3, Fsdp1, Fsdp2])
TEXTBOOK: list[type[Implementation]] = [Zero1, Zero2, Zero3]


class _Over(Exception):
    """Ends a case."""


def _stop(_: object) -> None:
    raise _Over


def _run(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> Implementation:
    """A case as the harness runs it: the last step ends when the gradients are reduced."""
    implementation = kind(build_model(case), case, mesh)
    rank = dist.get_rank()
    implementation.train_step(step_of(case, 0, rank, lambda _: None))
    try:
        implementation.train_step(step_of(case, 1, rank, _stop))
    except _Over:
        pass
    else:
        raise AssertionError("the step went on")
    list(implementation.shards())
    implementation.close()
    return implementation


def _resident() -> int:
    """Resident memory in bytes, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def _many(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[tuple[int, int]]:
    """Resident bytes and live tensors after 10, 20, 30 and 40 cases."""
    # torch notes the last 2000 collectives; until then it grows.
    for _ in range(2500):
        dist.all_reduce(torch.zeros(1), group=mesh.get_group())
    seen = []
    for _ in range(4):
        for _ in range(10):
            _run(mesh, kind, case)
        gc.collect()
        seen.append((_resident(), _tensors()))
    return seen


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", GROWING)
def test_nothing_grows(kind: type[Implementation]) -> None:
    case = on(CASES["mixed"], 2, "flat" if kind is Fsdp1GradOp else "block")
    for seen in in_ranks(2, _many, kind, case):
        grown = [after[0] - before[0] for before, after in pairwise(seen)]
        assert min(grown) < 256 << 10, f"a leak grows in every round: {grown}"
        assert seen[-1][1] <= seen[0][1]


def _without_collector(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> bool:
    gc.collect()
    gc.disable()
    try:
        return weakref.ref(_run(mesh, kind, case))() is None
    finally:
        gc.enable()


def _left(
    mesh: DeviceMesh, kind: type[Implementation], case: Case, forward: bool = False
) -> list[str]:
    """Parameters, flat or not, and optimizer states that are alive after `close`.

    forward: as after the last pass of a case, a forward without a backward.
    """
    subject = kind(build_model(case), case, mesh)
    assert isinstance(subject, BuiltImplementation)
    subject.train_step(step_of(case, 0, dist.get_rank(), lambda _: None))
    alive = {
        name: weakref.ref(parameter) for name, parameter in subject.built.model.named_parameters()
    }
    for number, state in enumerate(subject.built.optimizer.state.values()):
        alive |= {f"{number} {role}": weakref.ref(tensor) for role, tensor in state.items()}
    assert len(alive) > 1
    if forward:
        step = step_of(case, 1, dist.get_rank(), lambda _: None)
        first = replace(step.microbatches[0], on_loss=_stop)
        with suppress(_Over):
            subject.train_step(replace(step, microbatches=[first]))
    subject.close()
    del subject, state
    gc.collect()
    return [name for name, reference in alive.items() if reference() is not None]


@pytest.mark.every(2)
@pytest.mark.parametrize("sharding", ["flat", "block"])
@pytest.mark.parametrize("kind", [Fsdp1, Fsdp1GradOp, Fsdp1NoShard])
def test_a_module_that_lists_its_weights_keeps_nothing(
    kind: type[Implementation], sharding: str
) -> None:
    """GRU has its weights in a list of its own: views of the flat parameter, in the forward."""
    model = Model(blocks=(Block(kind="recurrent"), Block(kind="mlp")))
    for world_size in (1, 2):
        case = on(Case(model=model), world_size, sharding)
        assert in_ranks(world_size, _left, kind, case) == [[]] * world_size


@pytest.mark.parametrize("kind", [Fsdp1, Fsdp1GradOp, Fsdp1NoShard, Fsdp2])
def test_a_forward_without_a_backward_keeps_nothing(kind: type[Implementation]) -> None:
    """As the last pass of a case is. FSDP1 waits for the backward with a hook, and with whole
    parameters where it keeps them until then."""
    model = Model(blocks=(Block(kind="attention"), Block(kind="mlp")))
    case = on(Case(model=model), 2, "block")
    assert in_ranks(2, _left, kind, case, True) == [[]] * 2


@pytest.mark.parametrize("kind", TEXTBOOK)
def test_close_leaves_no_cycle(kind: type[Implementation]) -> None:
    assert all(in_ranks(2, _without_collector, kind, on(CASES["frozen"], 2, "layer")))


@pytest.mark.parametrize("kind", KINDS)
def test_what_kinds_handle_is_not_refused_and_the_rest_with_a_reason(
    kind: type[Implementation],
) -> None:
    assert kind.supports(Case()) is None
    for case in (Case(mesh=(2, 2)), Case(resume=(TrainingSegment(mesh=(2, 2)),))):
        reason = kind.supports(case)
        assert reason is None if "replicate" in kind.axes else "one axis only" in (reason or "")
    reason = kind.supports(Case(precision=Precision(compute="bf16")))
    assert reason is None if "precision" in kind.capabilities else "fp32" in (reason or "")
