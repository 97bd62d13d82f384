"""What makes ZeRO-3 ZeRO-3: parameters are released, gathering overlaps, the order is fixed."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerocheck.adapters.textbook.unit import FlatParameter, Unit
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Block, Case, Group, Model, Optimizer, Sharding, Training
from zerocheck.contract import Microbatch, Step
from zerocheck.models.network import build_model

from ..cases import CASES, TWICE, on
from ..driver import in_ranks, step_of

DEEP = Model(inputs=7, width=5, blocks=tuple(Block(kind="mlp", hidden=6) for _ in range(6)))
TWISTED = msgspec.structs.replace(DEEP, calls=(0, 1, 0, 2, 3, 3, 0, 4, 5, 1))


def _case(model: Model, prefetch: int, **given: Any) -> Case:
    sharding = Sharding(wrap="block", prefetch=prefetch, **given)
    return Case(mesh=(2,), model=model, sharding=sharding, training=Training(microbatches=2))


class _Log:
    """Events of the flat parameters, and how many units were gathered at once."""

    def __init__(self, implementation: Zero3, monkey: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.most = 0
        units = implementation.units
        wrapped = {name: getattr(FlatParameter, name) for name in ("gather", "wait", "reduce")}

        def logged(name: str) -> Any:
            def call(flat: FlatParameter, *given: Any) -> None:
                needed = name != "wait" or flat._work is not None
                if needed and not (name == "gather" and flat.gathered):
                    self.events.append((name, flat.name))
                wrapped[name](flat, *given)
                self.most = max(self.most, sum(unit.gathered for unit in units))

            return call

        for name in wrapped:
            monkey.setattr(FlatParameter, name, logged(name))


def _released(mesh: DeviceMesh, case: Case) -> list[tuple[list[int], ...]]:
    """Bytes held by the full parameters of (units, root): at start, after forward, reduced, end."""
    model = build_model(case)
    implementation = Zero3(model, case, mesh)
    seen: list[tuple[list[int], ...]] = []

    def look(*_: Any) -> None:
        groups = (
            [flat for unit in implementation.units for flat in unit.flats],
            implementation.root.flats,
        )
        seen.append(tuple([flat.storage.nbytes() for flat in flats] for flats in groups))

    def step(index: int) -> Step:
        plain = step_of(case, index, dist.get_rank(), look)
        batches = []
        for microbatch in plain.microbatches:
            loss_of = microbatch.loss_of

            def looked(outputs: Any, target: Any, loss_of: Any = loss_of) -> torch.Tensor:
                look()
                loss: torch.Tensor = loss_of(outputs, target)
                return loss

            batches.append(_with_loss(microbatch, looked))
        return Step(index=index, microbatches=batches, lr=plain.lr, reached=look)

    look()
    for index in range(2):
        implementation.train_step(step(index))
        look()
    return seen


def _with_loss(microbatch: Microbatch, loss_of: Any) -> Microbatch:
    """The microbatch with another loss function."""
    return Microbatch(
        inputs=microbatch.inputs, target=microbatch.target, seed=microbatch.seed, loss_of=loss_of
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_memory_is_released(reshard: bool) -> None:
    case = _case(TWICE, 1, reshard=reshard)
    for seen in in_ranks(2, _released, case):
        nothing = all(not any(bytes_) for group in (seen[0], seen[3], seen[4]) for bytes_ in group)
        assert nothing, "held between steps"
        for units, root in (seen[1], seen[2], seen[5], seen[6]):
            assert all(root), "the root stays gathered"
            assert not any(units) if reshard else all(units), "after the forward"


def _most_gathered(mesh: DeviceMesh, case: Case) -> tuple[int, list[tuple[str, str]]]:
    implementation = Zero3(build_model(case), case, mesh)
    with pytest.MonkeyPatch.context() as monkey:
        log = _Log(implementation, monkey)
        for index in range(3):
            implementation.train_step(step_of(case, index, dist.get_rank(), lambda _: None))
    return log.most, log.events


@pytest.mark.parametrize("model", [DEEP, TWISTED])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_few_units_are_gathered_at_once(model: Model, prefetch: int) -> None:
    for most, _ in in_ranks(2, _most_gathered, _case(model, prefetch)):
        assert most == 1 + prefetch


def _overlap(mesh: DeviceMesh, case: Case) -> list[tuple[str, str]]:
    """Events of the second step, with the computing of each block among them."""
    model = build_model(case)
    implementation = Zero3(model, case, mesh)
    with pytest.MonkeyPatch.context() as monkey:
        log = _Log(implementation, monkey)
        for number, block in enumerate(model.blocks):
            name = f"blocks.{number}"
            up: Any = block.up

            def forward(x: Any, plain: Any = up.forward, name: str = name) -> Any:
                log.events.append(("forward", name))
                return plain(x)

            up.forward = forward
            up.weight.register_post_accumulate_grad_hook(
                lambda _, name=name: log.events.append(("backward", name))
            )
        for index in range(2):
            log.events.clear()
            implementation.train_step(step_of(case, index, dist.get_rank(), lambda _: None))
    return log.events


def test_collectives_overlap_with_computing() -> None:
    case = msgspec.structs.replace(_case(DEEP, 1), training=Training())
    count = len(DEEP.blocks)
    for events in in_ranks(2, _overlap, case):
        turn = events.index(("forward", f"blocks.{count - 1}")) + 1
        forward, backward = events[:turn], events[turn:]
        for number in range(count - 1):
            here, after = f"blocks.{number}", f"blocks.{number + 1}"
            gathered = forward.index(("gather", after))
            waited = forward.index(("wait", after))
            assert gathered < forward.index(("forward", here)) < waited
            gathered = backward.index(("gather", here))
            waited = backward.index(("wait", here))
            assert gathered < backward.index(("backward", after)) < waited
            # The reduction is launched before the backward of the unit below, not at the end.
            reduced = backward.index(("reduce", after))
            assert reduced < backward.index(("backward", here))


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names and sizes of the collectives, in the order of launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.calls.append((str(func), first.numel()))
        return func(*args, **(kwargs or {}))


def _sequence(mesh: DeviceMesh, case: Case) -> list[tuple[str, int]]:
    model = build_model(case)
    implementation = Zero3(model, case, mesh)
    delays = random.Random(dist.get_rank())

    def dawdle(*_: Any) -> None:
        time.sleep(delays.random() * 0.005)

    for module in model.modules():
        module.register_forward_pre_hook(dawdle)
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(dawdle)
    trace = _Trace()
    with trace:
        for index in range(2):
            implementation.train_step(step_of(case, index, dist.get_rank(), lambda _: None))
    return trace.calls


@pytest.mark.parametrize("name", ["mixed", "twice", "frozen", "unused"])
def test_all_ranks_launch_the_same_collectives(name: str) -> None:
    case = on(CASES[name], 3, "layer")
    first, *others = in_ranks(3, _sequence, case)
    assert first and all(other == first for other in others)


class _Odd(nn.Module):
    """A view that is written to, a checkpoint, and a block that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.two = nn.ModuleList([_Two()])
        self.blocks.append(self.two[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)  # 3-D: a view of the product
        y += x
        y = checkpoint(self._inside, y, use_reentrant=False)
        one, other = self.blocks[3](y)
        return torch.as_tensor(one * other.sum())

    def _inside(self, y: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.blocks[2](torch.tanh(self.blocks[1](y))))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y * x, y


def _odd(mesh: DeviceMesh, sharding: Sharding) -> float:
    """Largest difference to a single device over three steps, with an evaluation in between."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case(
        mesh=(world_size,), sharding=sharding, optimizer=Optimizer(groups=(Group(eps=1e-3),))
    )
    alone = _Odd()
    model = _Odd()
    implementation = Zero3(model, case, mesh)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, eps=1e-3, weight_decay=1e-2)
    samples = torch.randn(3, world_size, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    worst = 0.0
    for index in range(3):

        def loss_of(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (outputs - target).square().mean()

        batches = [
            Microbatch(inputs=(x,), target=x[0], seed=0, loss_of=loss_of) for x in samples[index]
        ]
        with torch.no_grad():
            expected, got = alone(samples[0, 0]), model(samples[0, 0])
            worst = max(worst, float((expected - got).abs().max()))
        assert not any(flat.gathered for flat in implementation.flats)
        optimizer.zero_grad()
        for microbatch in batches:
            (microbatch.loss(alone) / world_size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        implementation.train_step(
            Step(index=index, microbatches=[batches[rank]], lr=[1e-3], reached=lambda _: None)
        )
    return worst


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("reshard", [True, False])
def test_odd_modules(reshard: bool, prefetch: int) -> None:
    sharding = Sharding(wrap="block", reshard=reshard, prefetch=prefetch)
    assert max(in_ranks(2, _odd, sharding)) < 1e-5


def _kept_bytes(mesh: DeviceMesh, case: Case) -> tuple[int, int]:
    """Elements of parameters that this rank keeps, padding included; all trainable elements."""
    model = build_model(case)
    total = sum(parameter.numel() for parameter in model.parameters())
    implementation = Zero3(model, case, mesh)
    assert all(isinstance(unit, Unit) for unit in implementation.units)
    return sum(flat.shard.numel() for flat in implementation.flats), total


def test_frozen_units_are_sharded_too() -> None:
    wide = msgspec.structs.replace(DEEP, width=64, frozen=("blocks.*",))
    for kept, total in in_ranks(2, _kept_bytes, _case(wide, 1)):
        assert total / 2 <= kept <= 1.1 * total / 2
