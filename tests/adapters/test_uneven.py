"""Parameters that only some ranks use, and what ZeRO-2 does while the backward runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Block, Case, Data, Group, Model, Optimizer, Sharding, Training
from zerocheck.contract import Implementation, Microbatch, Step
from zerocheck.models.network import build_model

from .cases import CASES, on
from .driver import copied, in_ranks, microbatches, step_of

TEXTBOOK: list[type[Implementation]] = [Zero1, Zero2, Zero3]


class _Routed(nn.Module):
    """Sample i goes through expert i % 3 of the one block: ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([_Experts()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.blocks[0](x, int(route))))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return torch.tanh(x @ self.weights[route])


def _difference(mesh: DeviceMesh, kind: type[Implementation]) -> float:
    """Largest difference to a single device over three steps, of the parameters on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case(
        mesh=(world_size,),
        sharding=Sharding(wrap="block", bucket=20),
        optimizer=Optimizer(groups=(Group(eps=1e-3),)),
    )
    alone, model = _Routed(), _Routed()
    implementation = kind(model, case, mesh)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, eps=1e-3, weight_decay=1e-2)
    samples = torch.randn(3, world_size, 2, 4, generator=torch.Generator().manual_seed(1))

    def loss_of(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (outputs - target).square().mean()

    for index in range(3):
        batches = [
            Microbatch(
                inputs=(x, torch.tensor((index + number) % 3)),
                target=torch.ones(2),
                seed=0,
                loss_of=loss_of,
            )
            for number, x in enumerate(samples[index])
        ]
        optimizer.zero_grad(set_to_none=False)
        for parameter in alone.parameters():
            parameter.grad = torch.zeros_like(parameter)  # unused counts as zero
        for microbatch in batches:
            (microbatch.loss(alone) / world_size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        implementation.train_step(
            Step(index=index, microbatches=[batches[rank]], lr=[1e-3], reached=lambda _: None)
        )
    expected = dict(alone.named_parameters())
    worst = 0.0
    for name, role, tensor, _, index in copied(implementation):
        if role == "parameter":
            assert tensor is not None
            whole = expected[name].detach()
            here = whole if index is None else whole.reshape(-1)[index]
            worst = max(worst, float((here - tensor).abs().max()))
    return worst


@pytest.mark.parametrize("kind", TEXTBOOK)
def test_parameters_that_one_rank_uses(kind: type[Implementation]) -> None:
    assert max(in_ranks(2, _difference, kind)) < 1e-6


def _bits(mesh: DeviceMesh, kinds: list[type[Implementation]], cases: list[Case]) -> list[str]:
    """Parameters whose gradient on one rank is not that of one device, bit for bit."""
    wrong = []
    for case in cases:
        alone = build_model(case)
        for microbatch in microbatches(case, 0, 0):
            loss = microbatch.loss(alone) / case.training.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        for kind in kinds:
            implementation = kind(build_model(case), case, mesh)
            got: dict[str, Any] = {}

            def reached(
                _: str, implementation: Implementation = implementation, got: Any = got
            ) -> None:
                got.update(
                    (name, tensor)
                    for name, role, tensor, _, _ in copied(implementation)
                    if role == "gradient"
                )

            implementation.train_step(step_of(case, 0, 0, reached))
            wrong += [
                f"{kind.__name__} {name}"
                for name, parameter in alone.named_parameters()
                if parameter.grad is not None
                and not torch.equal(got[name].reshape(-1), parameter.grad.reshape(-1))
            ]
    return wrong


def test_local_gradients_are_those_of_one_device() -> None:
    """Parameters lie at the alignment of torch's own, so that kernels take the same path."""
    cases = [
        msgspec.structs.replace(
            on(CASES[name], 1, sharding), data=Data(batch=1, length=1 + (name == "mixed"))
        )
        for name in ("plain", "mixed", "twice", "microbatches")
        for sharding in ("layer", "whole")
    ]
    assert in_ranks(1, _bits, TEXTBOOK, cases) == [[]]


def _zero2_events(mesh: DeviceMesh, case: Case) -> tuple[list[str], int, bool]:
    """Events of a step, most whole gradient buffers at once, and whether any is left."""
    model = build_model(case)
    events: list[str] = []
    first: Any = model.stem.weight
    first.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
    implementation = Zero2(model, case, mesh)
    launch = implementation.reduction.launch
    most = 0

    def launched(*given: Any) -> None:
        nonlocal most
        events.append("reduce")
        launch(*given)
        filling = sum(gradient._whole is not None for gradient in implementation.gradients)
        most = max(most, filling + len(implementation.reduction._in_flight))

    implementation.reduction.launch = launched  # type: ignore[method-assign, assignment]
    implementation.train_step(step_of(case, 0, dist.get_rank(), lambda _: None))
    left = any(parameter.grad is not None for parameter in model.parameters())
    left |= any(gradient._whole is not None for gradient in implementation.gradients)
    return events, most, left or bool(implementation.reduction._in_flight)


def test_zero2_reduces_in_the_backward_and_frees() -> None:
    model = Model(blocks=tuple(Block(kind="mlp") for _ in range(6)))
    case = Case(mesh=(2,), model=model, sharding=Sharding(bucket=80), training=Training())
    for events, most, left in in_ranks(2, _zero2_events, case):
        assert events.count("reduce") > 6
        assert events.index("last gradient") >= len(events) - 2, "reduced before the end"
        assert most <= 3 and not left
