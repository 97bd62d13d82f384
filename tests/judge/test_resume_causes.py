"""What is said of a state that came back wrong, from vectors made by hand."""

from __future__ import annotations

import pytest
import torch

from zerocheck import causes as bugs
from zerocheck.case.schema import Case, Group, Model, Optimizer, OptimizerKind, Precision
from zerocheck.contract.start import scramble
from zerocheck.judge.diagnose.resume import ResumeEvidence, Wrong, causes, data_causes
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.state import State
from zerocheck.models.network import build_model


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_frozen_parameter_that_was_left_out(compute: str, rounded: bool) -> None:
    """Where the model was cast when it was made, what it was before the load is rounded."""
    case = Case(model=Model(frozen=("head.*",)), precision=Precision(compute=compute))
    model = build_model(case)
    layout = ParameterLayout.of(model, case)
    saved = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    scramble(model, case)
    fresh = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    if rounded:
        fresh = fresh.bfloat16().float()
    left_out = ~layout.trainable
    loaded = torch.where(left_out, fresh, saved)
    state = State(parameter=saved, per_rank=[saved], moments={}, present={}, steps=[])
    known = ResumeEvidence(state, {}, 1, layout, case)
    named = causes([Wrong("parameter", loaded, saved, left_out)], [], known)
    assert named == (("frozen parameter not loaded",) if compute == "bf16" or not rounded else ())


@pytest.mark.parametrize("lost", [False, True])
def test_moments_that_are_0_are_an_optimizer_state_lost_only_with_the_step_count(
    lost: bool,
) -> None:
    case = Case()
    layout = ParameterLayout.of(build_model(case), case)
    saved = {role: torch.rand(layout.size) + 1 for role in ("exp_avg", "exp_avg_sq")}
    zero = torch.zeros(layout.size)
    everything = torch.ones(layout.size, dtype=torch.bool)
    state = State(parameter=zero, per_rank=[zero], moments=saved, present={}, steps=[3.0])
    known = ResumeEvidence(state, {}, 3, layout, case)
    wrong = [Wrong(role, zero, moment, everything) for role, moment in saved.items()]
    names = causes(wrong, [(0.0, 3.0)] if lost else [], known)
    assert ("optimizer state lost" in names) is lost and ("moments lost" in names) is not lost, (
        names
    )


@pytest.mark.parametrize(
    ("kind", "role", "other"),
    [
        ("adam", "exp_avg_sq", "exp_avg"),
        ("rmsprop", "momentum_buffer", "square_avg"),
        ("adamax", "exp_inf", "exp_avg"),
        ("rprop", "prev", "step_size"),
    ],
)
def test_swapped_states_are_named(kind: OptimizerKind, role: str, other: str) -> None:
    case = Case(optimizer=Optimizer(kind=kind, momentum=0.9 * (kind == "rmsprop")))
    layout = ParameterLayout.of(build_model(case), case)
    saved = {role: torch.rand(layout.size) + 1, other: torch.rand(layout.size) + 1}
    zero = torch.zeros(layout.size)
    state = State(parameter=zero, per_rank=[zero], moments=saved, present={}, steps=[3.0])
    everything = torch.ones(layout.size, dtype=torch.bool)
    known = ResumeEvidence(state, {}, 3, layout, case)
    wrong = Wrong(role, saved[other], saved[role], everything)
    assert causes([wrong], [], known) == ("moments swapped",)


@pytest.mark.parametrize("kind", ["adam", "sgd", "adamw"])
@pytest.mark.parametrize("moved", [False, True])
def test_states_of_a_step_without_a_gradient_are_named(kind: OptimizerKind, moved: bool) -> None:
    """Weight decay that is added to the gradient moves them; decoupled decay leaves them at 0."""
    group = Group(weight_decay=0.1)
    case = Case(optimizer=Optimizer(kind=kind, groups=(group,), momentum=0.9 * (kind == "sgd")))
    model = build_model(case)
    layout = ParameterLayout.of(model, case)
    held = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    role = "momentum_buffer" if kind == "sgd" else "exp_avg"
    saved = dict.fromkeys((role, "exp_avg_sq"), torch.zeros(layout.size))
    counts: list[float | None] = [0.0] * len(layout.places)
    state = State(parameter=held, per_rank=[held], moments=saved, present={}, steps=counts)
    known = ResumeEvidence(state, {}, 1, layout, case)
    loaded = 0.1 * held * (1.0 if kind == "sgd" else 1 - group.beta1)
    wrong = Wrong(role, 1.01 * loaded if moved else loaded, saved[role], loaded != 0)
    named = causes([wrong], [], known)
    assert named == (("optimizer stepped by the load",) if kind != "adamw" and not moved else ())


@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_both_moments_of_adam_after_such_a_step(role: str, factor: float) -> None:
    """In fp32, by the kernel that reads its options in double precision."""
    group = Group(weight_decay=0.1)
    case = Case(optimizer=Optimizer(kind="adam", groups=(group,)))
    model = build_model(case)
    layout = ParameterLayout.of(model, case)
    parameters = [one.detach().clone().requires_grad_() for one in model.parameters()]
    options = {"lr": group.lr, "betas": (group.beta1, group.beta2), "weight_decay": 0.1}
    optimizer = torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    held = torch.cat([one.detach().clone().reshape(-1) for one in parameters])
    optimizer.step()
    loaded = torch.cat([optimizer.state[one][role].reshape(-1) for one in parameters])
    saved = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(layout.size))
    counts: list[float | None] = [0.0] * len(layout.places)
    state = State(parameter=held, per_rank=[held], moments=saved, present={}, steps=counts)
    wrong = Wrong(role, factor * loaded, saved[role], loaded != 0)
    named = causes([wrong], [], ResumeEvidence(state, {}, 1, layout, case))
    assert named == (("optimizer stepped by the load",) if factor == 1.0 else ())


@pytest.mark.parametrize(
    ("given", "saved", "ranks", "names"),
    [
        ([4], 12, (3, 1), (bugs.DATA_POSITION_COUNTED_IN_STEPS, bugs.DATA_POSITION_OF_ONE_RANK)),
        ([4, 4], 12, (3, 2), (bugs.DATA_POSITION_OF_ONE_RANK,)),
        ([8, 8], 12, (3, 2), (bugs.DATA_POSITION_COUNTED_IN_STEPS,)),
        ([10, 10], 32, (3, 2), (bugs.DATA_POSITION_OF_ONE_RANK,)),  # 32 // 3
        ([21, 21], 32, (3, 2), (bugs.DATA_POSITION_COUNTED_IN_STEPS,)),
        ([0, 0], 32, (3, 2), (bugs.DATA_POSITION_LOST,)),
        ([11, 11], 32, (3, 2), ()),
    ],
)
def test_causes_of_a_data_position(
    given: list[int], saved: int, ranks: tuple[int, int], names: tuple[str, ...]
) -> None:
    assert data_causes(given, saved, *ranks) == names
