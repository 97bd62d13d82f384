"""Who holds which bytes: the census, the allocator's log, and the ledger that closes one by the
other."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardOfDim

from zerocheck.case.measurement import settled
from zerocheck.case.schema import Case, Model, Training
from zerocheck.compat_memory import Allocation, AllocatorLog, ReducerBuffers
from zerocheck.contract import Shard
from zerocheck.drive.attribution import GONE, MARK, Attribution, PhaseEnd
from zerocheck.drive.holders import Claim, address, fresh_objects, object_claims, shard_claims
from zerocheck.drive.measure import has_a_holder, measured_end
from zerocheck.protocol.layout import Line
from zerocheck.protocol.measurements import HARNESS, LOCAL, UNEXPLAINED

BUILT, FORWARD, STEP = PhaseEnd(-1, "built"), PhaseEnd(0, "forward"), PhaseEnd(0, "step")


class _Subject:
    """Holds a parameter with its gradient, an optimizer, and a tensor in a list in a dict."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.AdamW([self.weight])
        self.kept = {"sent": [torch.zeros(3)]}
        self.gradients = (torch.zeros(2),)
        self.view = self.weight.detach()[1:]

    def shards(self) -> Sequence[Shard]:
        return [Shard("w", "parameter", self.weight.detach(), (4,))]


def claims_of(subject: _Subject | None, *harness: Any) -> dict[int, Claim]:
    here = sys._getframe()
    return object_claims(subject, harness, here, here)


def test_the_census_names_who_holds_a_storage() -> None:
    with fresh_objects():
        subject, batch, loose = _Subject(), torch.zeros(7), torch.zeros(1)
        subject.weight.sum().backward()
        subject.optimizer.step()
        claims = claims_of(subject, [batch])
        assert claims[address(batch)] == Claim(1, "other", HARNESS)
        sent = claims[address(subject.kept["sent"][0])]
        assert sent == Claim(2, "other", "_Subject.kept['sent'][0]")
        assert claims[address(subject.gradients[0])].category == "gradient"
        assert claims[address(subject.weight.grad)].category == "gradient"
        state = subject.optimizer.state[subject.weight]
        assert {claims[address(one)].category for one in state.values()} == {"optimizer"}
        assert claims[address(subject.weight)].category == "gathered"  # not shown as a shard yet
        assert shard_claims(subject)[address(subject.weight)] == Claim(0, "parameter", "w")  # type: ignore[arg-type]
        assert address(subject.view) == address(subject.weight)
        assert address(loose) not in claims


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_frozen_before_stays_so(frozen: bool) -> None:
    """Else each later collection in a rank would go through all that it shares with others."""
    gc.unfreeze()
    kept = [object]
    try:
        if frozen:
            gc.freeze()
        with fresh_objects():
            assert not any(one is kept for one in gc.get_objects())
        assert (gc.get_freeze_count() > 0) is frozen
        assert any(one is kept for one in gc.get_objects()) is not frozen
    finally:
        gc.freeze()  # as tests/conftest.py has it


def test_local_variables_of_running_functions_have_names() -> None:
    def inner(end: Any) -> dict[int, Claim]:
        loss = torch.zeros(5)
        return {address(loss): object_claims(None, (), sys._getframe(), end)[address(loss)]}

    with fresh_objects():
        (claim,) = inner(sys._getframe()).values()
    assert claim.category == "other"
    assert claim.holder.startswith(f"{LOCAL} loss of ") and claim.holder.endswith("inner")


def test_the_allocators_log_sees_what_python_does_not() -> None:
    log = AllocatorLog()
    log.start()
    tensor = torch.zeros(10)
    log.mark(f"{MARK}a")
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(80)
    del tensor
    events = log.stop(MARK)
    at = events.index(f"{MARK}a")
    bytes_ = [one.bytes for one in events if isinstance(one, Allocation)]
    assert sum(bytes_) == 0
    assert bytes_[0] == 40 and at == 1
    assert -40 in bytes_ and 80 in bytes_ and bytes_[-1] == -80
    first = events[0]
    assert isinstance(first, Allocation) and first.operators == ("aten::zeros", "aten::empty")


def ledger(
    *events: str | Allocation, buckets: Counter[int] | None = None, **claims: Any
) -> Attribution:
    looked = {BUILT: claims.get("built", {}), FORWARD: claims.get("forward", {})}
    return Attribution(list(events), {**looked, STEP: claims.get("step", {})}, buckets or Counter())


def test_a_storage_is_what_it_is_ever_claimed_to_be() -> None:
    found = ledger(
        Allocation(1, 8, ()), BUILT.mark, FORWARD.mark, STEP.mark,
        built={1: Claim(2, "other", "a.b")}, step={1: Claim(0, "gradient", "w")},
    )  # fmt: skip
    assert list(found.lines()) == [
        Line(place.phase, place.step, "gradient", 8, "w") for place in (BUILT, FORWARD, STEP)
    ]


def test_an_address_that_is_given_out_again_is_another_block() -> None:
    found = ledger(
        Allocation(1, 8, ()), BUILT.mark, Allocation(1, -8, ()), Allocation(1, 12, ()),
        FORWARD.mark, STEP.mark,
        built={1: Claim(0, "parameter", "w")}, forward={1: Claim(1, "gathered", "w")},
    )  # fmt: skip
    assert [(line.category, line.bytes) for line in found.lines()] == [
        ("parameter", 8),
        ("gathered", 12),
        ("gathered", 12),
    ]


@pytest.mark.parametrize(
    ("born", "operators", "size", "category", "holder"),
    [
        (1, ("aten::linear", "aten::addmm"), 8, "activation", "aten::linear"),
        (1, (), 8, "activation", "a number"),
        (0, ("aten::empty",), 16, "bucket", "a reducer of DDP"),
        (1, ("DistributedDataParallel.forward", "aten::empty"), 16, "bucket", "a reducer of DDP"),
        (0, ("aten::empty",), 8, "other", f"{UNEXPLAINED} in aten::empty"),
        (0, ("aten::linear",), 16, "other", f"{UNEXPLAINED} in aten::linear"),
        (2, ("aten::linear",), 8, "other", f"{UNEXPLAINED} in aten::linear"),
    ],
)
def test_what_python_never_held_is_explained_by_its_birth(
    born: int, operators: tuple[str, ...], size: int, category: str, holder: str
) -> None:
    events: list[str | Allocation] = [BUILT.mark, FORWARD.mark, STEP.mark]
    events.insert(born, Allocation(1, size, operators))
    last = list(ledger(*events, buckets=Counter({16: 2})).lines())[-1]
    assert (last.category, last.holder, last.bytes) == (category, holder, size)


def test_what_is_given_back_on_other_threads_is_gone() -> None:
    clone = Allocation(1, 8, ("c10d::_reduce_scatter_base_", "aten::clone"))
    held_on = Allocation(2, 8, ("c10d::allreduce_", "aten::clone"))
    found = ledger(
        clone, held_on, Allocation(3, 8, ()), f"{GONE}3", BUILT.mark, FORWARD.mark, STEP.mark,
        built={2: Claim(2, "other", "a.b")},
    )  # fmt: skip
    assert {(line.holder, line.bytes) for line in found.lines()} == {("a.b", 8)}


def test_enough_steps_are_taken_to_see_growth() -> None:
    def steps(**training: Any) -> tuple[int, int]:
        case = Case(model=Model(frozen=("stem.*",)), training=Training(**training))
        return settled(case), measured_end(case)

    assert steps(steps=1) == (0, 3)
    assert steps(steps=5) == (0, 5)
    assert steps(steps=3, unfreeze=2) == (2, 5)
    assert steps(steps=2, loss_scale=2.0, overflow=0) == (1, 4)
    assert steps(steps=2, loss_scale=2.0, overflow=1) == (0, 3)


def test_what_a_reducer_held_that_is_gone_is_waited_for() -> None:
    tensor = torch.zeros(60)
    storage = tensor.untyped_storage()
    gone = ReducerBuffers(Counter(), Counter())
    bucket = ReducerBuffers(Counter({240: 1}), Counter())
    assert not has_a_holder(storage, {}, gone)
    assert has_a_holder(storage, {address(tensor): Claim(1, "other", HARNESS)}, gone)
    assert has_a_holder(storage, {}, ReducerBuffers(Counter(), Counter({240: 1})))
    assert not has_a_holder(storage, {}, bucket)  # of the size of a bucket, and no parameter's view
    views = tensor.split(30)
    assert has_a_holder(storage, {}, bucket)
    assert len(views) == 2


def test_the_gradient_of_a_dtensor_is_found() -> None:
    """Nobody lets go of it, so nobody is waited for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with fresh_objects():
            mesh = DeviceMesh("cpu", [0])
            weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [ShardOfDim(0)]))
            weight.sum().backward()
            assert isinstance(weight.grad, DTensor)
            where = address(weight.grad.to_local())
            assert claims_of(None)[where] == Claim(1, "gradient", "a .grad")
    finally:
        dist.destroy_process_group()
