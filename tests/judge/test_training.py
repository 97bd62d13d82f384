"""Token weights, skipped steps, unfreezing and carried random numbers, on real observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from zerocheck.case.schema import Block, Case, Data, Model, Start, Training
from zerocheck.case.shapes import parameter_shapes

CASE = Case(
    mesh=(3,),
    seed=4,
    model=Model(
        stem="embedding",
        inputs=7,
        width=6,
        outputs=5,
        blocks=(Block(kind="mlp", hidden=7, dropout=0.5),),
        frozen=("blocks.0.up.*",),
    ),
    data=Data(batch=2, length=3, masked=True, rng="carried"),
    start=Start(step=2, moments="typical"),
    training=Training(
        steps=4, microbatches=2, clip=0.01, unfreeze=2, loss_scale=1024.0, overflow=1
    ),
)
ALL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.mark.every(2)
@pytest.mark.parametrize("kernel", ["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("implementation", ALL)
def test_everything_at_once_holds(observe: Callable, implementation: str, kernel: str) -> None:
    optimizer = msgspec.structs.replace(CASE.optimizer, kernel=kernel, amsgrad=True)
    observed = observe(implementation, msgspec.structs.replace(CASE, optimizer=optimizer))
    for rank in observed.seen:
        assert [step.skipped for step in rank.steps] == [False, True, False, False, False]
        assert [step.loss_scale for step in rank.steps[:4]] == [1024.0, 1024.0, 512.0, 512.0]
        assert [len(step.random) for step in rank.steps] == [2, 2, 2, 2, 1]
    judgement = observed.judge()
    assert judgement.violations == ()
    later = observed.places("gradient", "reduced", 2, "blocks.0.up.weight")
    assert later and not observed.places("gradient", "reduced", 0, "blocks.0.up.weight")


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("parameter", ["stem.weight", "blocks.0.down.bias", "head.weight"])
def test_an_overflow_in_one_gradient_alone_is_seen_by_all(
    observe: Callable, implementation: str, parameter: str
) -> None:
    training = msgspec.structs.replace(CASE.training, overflow_in=parameter)
    observed = observe(implementation, msgspec.structs.replace(CASE, training=training))
    for rank in observed.seen:
        assert [step.skipped for step in rank.steps] == [False, True, False, False, False]
        assert all(math.isfinite(loss) for step in rank.steps for loss in step.losses)
    judgement = observed.judge()
    assert judgement.violations == ()
    infinite = [
        name
        for name in parameter_shapes(CASE.model)
        if any(not p.isfinite().all() for _, p in observed.places("gradient", "reduced", 1, name))
    ]
    assert infinite == [parameter]


def _told(observed: Any, rank: int, step: int, **changed: Any) -> None:
    """Change what a rank reported of a step."""
    seen = observed.seen[rank]
    steps = list(seen.steps)
    steps[step] = msgspec.structs.replace(steps[step], **changed)
    observed.seen[rank] = msgspec.structs.replace(seen, steps=tuple(steps))


@pytest.mark.parametrize(
    ("ranks", "step", "changed", "cause"),
    [
        ((1,), 1, {"skipped": False}, "ranks disagree"),
        ((2,), 0, {"skipped": True}, "ranks disagree"),
        ((0,), 2, {"loss_scale": 256.0}, "ranks disagree"),
        ((0, 1, 2), 2, {"loss_scale": float("nan")}, "loss scale"),
        ((0, 1, 2), 2, {"loss_scale": 0.0}, "loss scale"),
        ((0, 1, 2), 1, {"skipped": False}, "step not skipped"),
        ((0, 1, 2), 0, {"skipped": True}, "step skipped"),
    ],
)
def test_wrong_reports(
    observe: Callable, ranks: tuple[int, ...], step: int, changed: dict[str, Any], cause: str
) -> None:
    observed = observe("zero2", CASE)
    for rank in ranks:
        _told(observed, rank, step, **changed)
    (violation,) = [v for v in observed.judge().violations if v.obligation == "update"]
    assert violation.step == step
    assert violation.causes == (cause,)


def test_a_needless_skip_is_seen_where_gradients_are_hidden(observe: Callable) -> None:
    """Whether the gradient is finite is known from the reference."""
    observed = observe("zero2", CASE)
    for rank in range(3):
        _told(observed, rank, 0, skipped=True)
    observed.seen = [
        msgspec.structs.replace(one, records=tuple(r for r in one.records if r.role != "gradient"))
        for one in observed.seen
    ]
    (violation,) = [v for v in observed.judge().violations if v.obligation == "update"]
    assert violation.step == 0 and violation.causes == ("step skipped",)


@pytest.mark.parametrize("role", ["parameter", "exp_avg", "exp_avg_sq", "step"])
def test_a_skipped_step_changes_no_bit(observe: Callable, role: str) -> None:
    observed = observe("zero1", CASE)
    for _, tensor in observed.places(role, "state", 1, "head.weight"):
        tensor[0] += 1.0
    violations = observed.judge().violations
    (violation,) = [v for v in violations if v.step == 1 and v.obligation == "update"]
    assert violation.causes == ("skipped step changed the state",)
    assert violation.role == role


def test_equal_random_states_of_two_ranks(observe: Callable) -> None:
    observed = observe("ddp", CASE)
    first, second = observed.seen[:2]
    states = (first.random_states[first.steps[1].random[0]], *second.random_states)
    shifted = [
        msgspec.structs.replace(s, random=tuple(n + 1 for n in s.random)) for s in second.steps
    ]
    shifted[1] = msgspec.structs.replace(shifted[1], random=(0, shifted[1].random[1]))
    observed.seen[1] = msgspec.structs.replace(second, random_states=states, steps=tuple(shifted))
    violation = observed.judge().violations[0]
    assert (violation.obligation, violation.causes) == ("loss", ("seed for all",))
    assert violation.ranks == (0, 1)
