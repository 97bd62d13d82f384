"""Steps of torch's Adafactor, which needs whole matrices, and what they are on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerocheck import causes as bugs
from zerocheck.case.schema import Group, Optimizer
from zerocheck.floating_point import Format
from zerocheck.judge.compare import compare
from zerocheck.judge.diagnose.update import fitting
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import Reading, Segment, UpdateElements
from zerocheck.optimizers.unsharded.optimizer import Unsharded

GROUP = Group(lr=0.01, eps=1e-6, weight_decay=0.1)
COUNT = 5
Held = dict[str, torch.Tensor]


def _rule() -> Unsharded:
    rule = OPTIMIZERS["adafactor"]
    assert isinstance(rule, Unsharded)
    return rule


def _before(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Held:
    """Parameter, gradient and expanded states. Rows of the gradient differ in size."""
    draw = torch.Generator().manual_seed(3)
    p, g = (torch.empty(shape).normal_(generator=draw) for _ in range(2))
    g *= torch.logspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    states = _rule().drawn(p, Optimizer(kind="adafactor"), 1.0, draw)
    return {name: t.to(dtype) for name, t in {"parameter": p, "gradient": g, **states}.items()}


def _stepped(before: Held, kernel: str, way: type[torch.optim.Adafactor]) -> Held:
    """Take one step with torch's class, or one made of it; states are expanded after it."""
    rule, p = _rule(), before["parameter"]
    group = rule.torch_group(GROUP, Optimizer(kind="adafactor", kernel=kernel))  # type: ignore[arg-type]
    held = torch.nn.Parameter(p.clone())
    held.grad = before["gradient"].clone()
    made: Any = way
    optimizer = made([{**group, "params": [held]}])
    shapes = {role: rule.state_shape(role, p.dim()) for role in rule.states}
    shapes = {role: shape for role, shape in shapes.items() if shape is not None}
    optimizer.state[held] = {
        "step": torch.tensor(float(COUNT)),
        **{role: shape.contracted(before[role]) for role, shape in shapes.items()},
    }
    optimizer.step()
    state = optimizer.state[held]
    found = {role: shape.expanded(state[role], p.shape) for role, shape in shapes.items()}
    return {**found, "parameter": held.detach()}


def _elements(before: Held) -> UpdateElements:
    p = before["parameter"]
    zeros = torch.zeros_like(p)
    return UpdateElements(
        p.double().reshape(-1),
        before["gradient"].double().reshape(-1),
        {role: before.get(role, zeros).double().reshape(-1) for role in _rule().states},
        {},
        format=Format.of(p.dtype),
        shape=tuple(p.shape),
        held=True,
    )


def _outside(before: Held, after: Held, reading: Reading, kernel: str) -> list[str]:
    options = Optimizer(kind="adafactor", kernel=kernel)  # type: ignore[arg-type]
    scalars = _rule().scalars(GROUP, options, lr=GROUP.lr, step=COUNT + 1, reading=reading)
    return [
        role
        for role, enclosure in _rule().enclosures(_elements(before), scalars)
        if compare(after[role].double().reshape(-1), enclosure)[1] is not None
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 6), (9,)])
def test_a_step_has_the_same_bits_and_another_kernel_is_near(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    before = _before(shape, dtype)
    for kernel in ("for-loop", "foreach"):
        after = _stepped(before, kernel, torch.optim.Adafactor)
        assert _outside(before, after, "same kernels", kernel) == []
    assert _outside(before, after, "estimated", "for-loop") == []


def test_a_wrong_element_is_outside() -> None:
    before = _before((7, 5))
    for role in ("row_var", "col_var", "parameter"):
        after = _stepped(before, "foreach", torch.optim.Adafactor)
        wrong = {**after, role: after[role].clone()}
        wrong[role][3, 2] += 0.01 * (after[role] - before[role]).abs()[3, 2]
        assert _outside(before, wrong, "estimated", "foreach") == [role]


def _causes(before: Held, role: str, wrong: torch.Tensor) -> set[str]:
    """Return the causes whose enclosure has what is observed."""
    options = Optimizer(kind="adafactor")
    rule = _rule()
    observed = wrong.double().reshape(-1)
    segment = Segment(
        role=role,
        observed=observed,
        elements=_elements(before),
        options=options,
        group=GROUP,
        lr=GROUP.lr,
        step=COUNT + 1,
        reading="estimated",
        ranks=(2,),
    )
    return {change.cause for change in fitting(rule, [segment])}


def test_a_mean_of_the_means_of_unequal_shards() -> None:
    before = _before((7, 5))
    square = before["gradient"] ** 2
    mean = (square[:4].mean(0) + square[4:].mean(0)) / 2
    weight = (COUNT + 1) ** -0.8
    wrong = torch.lerp(before["col_var"], mean.expand(7, 5), weight)
    assert _causes(before, "col_var", wrong) == {bugs.MEAN_OF_SHARD_MEANS}


def test_a_rank_without_rows_adds_nothing_to_a_mean_of_means() -> None:
    before = _before((1, 5))
    mean = before["gradient"] ** 2 / 2
    wrong = torch.lerp(before["col_var"], mean, (COUNT + 1) ** -0.8)
    assert bugs.MEAN_OF_SHARD_MEANS in _causes(before, "col_var", wrong)


def test_steps_of_each_shard() -> None:
    before = _before((7, 5))
    parts = [{name: t[rows] for name, t in before.items()} for rows in (slice(4), slice(4, 7))]
    after = [_stepped(part, "foreach", torch.optim.Adafactor) for part in parts]
    for role in ("col_var", "parameter"):
        wrong = torch.cat([one[role] for one in after])
        assert _causes(before, role, wrong) == {bugs.STEP_OF_EACH_SHARD}


def test_norms_of_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter's scale and the clipping of the update, by the rows of one rank."""
    before = _before((7, 5))
    norm, rows = torch.Tensor.norm, slice(0)

    def of_rows(self: torch.Tensor, *args: Any) -> torch.Tensor:
        found: torch.Tensor = norm(self[rows], *args) * (7 / len(self[rows])) ** 0.5
        return found

    monkeypatch.setattr(torch.Tensor, "norm", of_rows)
    after = []
    for rows in (slice(4), slice(4, 7)):
        after.append(_stepped(before, "for-loop", torch.optim.Adafactor)["parameter"][rows])
    monkeypatch.undo()
    assert _causes(before, "parameter", torch.cat(after)) == {bugs.NORM_OF_EACH_SHARD}
