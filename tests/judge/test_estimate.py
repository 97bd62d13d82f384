"""Bounds that are estimated: how far kernels that are not the reference's can be off."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from zerocheck.case.schema import Block, Case, Data, Model
from zerocheck.contract.semantics import Semantics
from zerocheck.execution.operator_noise import (
    CancellationNoise,
    OperatorNoise,
    PartedNoise,
    StepNoise,
    round_off,
)
from zerocheck.judge.estimate import MARGIN, REPLICAS, Tolerances, estimate_by_tensor
from zerocheck.judge.expected import expected
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.local import LocalRunner, Passes
from zerocheck.judge.obligations import buffers, loss
from zerocheck.judge.perturbation import moved, rounding_otherwise
from zerocheck.models.network import build_model
from zerocheck.protocol.observations import StepObservation
from zerocheck_reference import unit_roundoff

U = 2.0**-24
CASE = Case(
    mesh=(2,),
    model=Model(inputs=5, width=8, outputs=3, blocks=(Block(kind="mlp"), Block(kind="batch_norm"))),
    data=Data(batch=2, length=3),
)


class Ran:
    """The passes of a case, and of its replicas."""

    def __init__(self, case: Case) -> None:
        model = build_model(case)
        self.layout = ParameterLayout.of(model, case)
        self.runner = LocalRunner(model, case, self.layout)
        self.flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(2)]
        self.passes = self.run(self.flat)
        replicas = []
        for replica in range(REPLICAS):
            with self.runner.rounding_otherwise(replica):
                replicas.append(self.run(moved(self.flat, self.layout, replica)))
        self.tolerances: Tolerances = estimate_by_tensor(self.passes, replicas, self.layout)

    def run(self, flat: torch.Tensor) -> Passes:
        seen = [StepObservation(())] * 2
        return self.runner.run(0, [flat] * 2, self.buffers, seen, loss_divisor=1.0)


@pytest.fixture(scope="module")
def ran() -> Ran:
    return Ran(CASE)


def test_every_number_moves_to_the_one_beside_it(ran: Ran) -> None:
    other = moved(ran.flat, ran.layout, 0)
    ratio = (other.double() / ran.flat.double() - 1)[ran.flat != 0].abs()
    assert float(ratio.min()) >= U and float(ratio.max()) <= 4 * U
    assert not torch.equal(other, moved(ran.flat, ran.layout, 1))


def test_what_modules_give_is_moved_and_only_within() -> None:
    layer = torch.nn.Linear(3, 4)
    x = torch.randn(2, 3)
    plain = layer(x)
    with rounding_otherwise(layer, 0):
        first, again = layer(x), layer(x)
    assert torch.equal(first, again) and not torch.equal(first, plain)
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("mode", [CancellationNoise, OperatorNoise])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (torch.nn.LayerNorm(1), (4, 3, 1)),
        (torch.nn.LayerNorm((3, 2)), (4, 3, 2)),
        (torch.nn.GroupNorm(2, 6), (4, 6, 5)),
    ],
)
def test_terms_that_cancel_in_a_norm_are_moved(
    mode: Any, norm: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    """Of equal elements rstd is 1 / sqrt(eps) = 316, and what is left of its terms may be 0."""
    seed = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def gradient_of(*modes: Any) -> torch.Tensor:
        x = torch.ones(shape, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for one in modes:
                stack.enter_context(one(0))
            norm(x).backward(seed)
        assert x.grad is not None
        return x.grad

    own = gradient_of()
    moved_by = (gradient_of(mode) - own).abs()
    unit = 2 * U * 316.3 * float(seed.abs().max())
    assert 0.1 * unit < float(moved_by.max()) < 4 * unit
    if shape[-1] == 1:
        assert not own.any() and moved_by.all()


def test_the_bound_is_some_roundings_and_no_more(ran: Ran) -> None:
    sums = ran.passes.gradients.double().sum((0, 1))
    for place in ran.layout.places:
        here = slice(place.start, place.stop)
        largest = float(ran.passes.gradients[..., here].abs().amax(-1).sum())
        bound = float(ran.tolerances.gradient[here].max())
        assert MARGIN * 2 * U * largest <= bound, place.name
        if float(sums[here].abs().max()) > 1e-5:  # not one that is 0 but for rounding
            assert bound < 1e-3 * largest, place.name
    assert 0 < ran.tolerances.loss < 1e-4
    assert ran.tolerances.buffers and all(
        0 <= one < 1e-4 for one in ran.tolerances.buffers.values()
    )


@pytest.mark.parametrize(("factor", "violated"), [(1.0 + 4 * U, False), (1.01, True)])
def test_a_loss_a_gradient_and_a_buffer_are_let_be_off_so_far(
    ran: Ran, factor: float, violated: bool
) -> None:
    passes = ran.passes
    seen = [[value * factor for value in rank] for rank in passes.losses]
    assert (
        loss.check(seen, passes.losses, step=0, tolerance=ran.tolerances.loss) is not None
    ) is violated
    assert loss.check(seen, passes.losses, step=0) is not None
    floating = [
        {n: b * factor for n, b in rank.items() if b.is_floating_point()} for rank in passes.buffers
    ]
    given = {"step": 0, "before": passes.buffers}
    answer = buffers.check(
        floating, passes.buffers, Semantics(), tolerances=ran.tolerances.buffers, **given
    )  # type: ignore[arg-type]
    assert (answer is not None) is violated
    assert buffers.check(floating, passes.buffers, Semantics(), **given) is not None  # type: ignore[arg-type]
    derived = expected(passes, ran.layout, CASE, Semantics()).enclosure
    estimated = expected(
        passes, ran.layout, CASE, Semantics(), noise=ran.tolerances.gradient
    ).enclosure
    assert torch.equal(derived.exact, estimated.exact)
    outside = (derived.exact * (factor - 1)).abs() > estimated.bound
    assert bool(outside.any()) is violated


def test_operators_are_moved_in_what_is_checkpointed_too() -> None:
    """A token near two experts goes to one in the forward: a second forward, moved in another way,
    would send it to the other, and have tensors of other shapes."""
    block = Block(kind="experts", experts=4, hidden=4, dtype="bf16")
    plain = Case(model=Model(width=4, blocks=(block,)), data=Data(batch=8, length=16))
    kept = msgspec.structs.replace(block, checkpoint=True)
    case = msgspec.structs.replace(
        plain, model=msgspec.structs.replace(plain.model, blocks=(kept,))
    )
    moved_passes = []
    for one in (plain, case):
        made = Ran(one)
        with made.runner.moving_operators(3):
            moved_passes.append(made.run(made.flat))
        assert not torch.equal(moved_passes[-1].gradients, made.passes.gradients)
    assert torch.equal(moved_passes[0].gradients, moved_passes[1].gradients)
    with made.runner.moving_operators(3):
        pass
    assert torch.equal(made.run(made.flat).gradients, made.passes.gradients)


def test_numbers_that_are_counted_are_not_off() -> None:
    counts = {"count": torch.tensor(3)}
    one = Passes(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0), [[1.0]], [counts])
    found = estimate_by_tensor(one, [replace(one, losses=[[1.5]])], ParameterLayout.of_places([]))
    assert found.buffers == {} and found.loss == MARGIN * 0.5


def test_what_is_not_finite_gives_no_room() -> None:
    one = Passes(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0), [[float("inf")]], [{}])
    assert estimate_by_tensor(one, [one], ParameterLayout.of_places([])).loss == 0.0


def test_elements_of_one_tensor_that_hardly_moved_by_chance_have_the_median_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.empty(64, 32).normal_(generator=generator)

    def product() -> torch.Tensor:
        return (matrix @ matrix.T @ matrix).reshape(-1)

    alone = round_off(product, product())
    pooled = round_off(product, product(), pools=(matrix.numel(),))
    median = float(alone.median())
    assert torch.equal(pooled, alone.clamp(min=median))
    assert float(alone.min()) < 0.7 * median == 0.7 * float(pooled.min())
    apart = round_off(product, product(), pools=(1024, 1024))
    assert torch.equal(apart[:1024], alone[:1024].clamp(min=float(alone[:1024].median())))


def test_a_step_is_moved_in_place_and_by_products_that_cancel() -> None:
    """g + w p = 0 hides how the product was rounded; a count of steps is never moved."""
    p, count = torch.full((64,), 0.75), torch.tensor(3.0)

    def step() -> torch.Tensor:
        gradient = torch.full((64,), -0.375)
        count.copy_(3.0).add_(1.0)
        return gradient.add_(p, alpha=0.5).mul_(1.0)

    exact = step()
    assert not bool(exact.any())
    assert float(round_off(step, exact, StepNoise).min()) >= 2.0**-24 * 0.375
    assert float(round_off(step, exact).max()) == 0.0
    assert float(count) == 4.0


@pytest.mark.parametrize("operator", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_of_sharded_matrices_are_moved_by_a_rounding_of_each_part(operator: str) -> None:
    """Parts that cancel are rounded by themselves, and the result shows nothing of it."""
    sharp = torch.full((4, 3), 256.0)
    one = torch.cat([sharp, -sharp], dim=1).bfloat16()
    other = torch.ones(6, 5).bfloat16()
    inputs = [one, other]
    if operator.startswith("b"):
        inputs = [tensor.unsqueeze(0) for tensor in inputs]
    if "add" in operator:
        inputs = [torch.zeros_like(inputs[0] @ inputs[1]), *inputs]
    product = getattr(torch, operator)

    def made() -> torch.Tensor:
        found: torch.Tensor = product(*inputs)
        return found

    exact = made()
    assert not bool(exact.any())
    whole, parted = (round_off(made, exact, partial(PartedNoise, parts=parts)) for parts in (1, 2))
    part = 768 * unit_roundoff(torch.bfloat16)
    assert float(whole.max()) == 0.0
    assert float(parted.min()) >= part
