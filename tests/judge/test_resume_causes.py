"""What is said of a state that came back wrong, from vectors made by hand."""

from __future__ import annotations

import pytest
import torch

from zerocheck.case.schema import Case, Model, Precision
from zerocheck.judge.diagnose.resume import ResumeEvidence, Wrong, causes
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.state import State
from zerocheck.models.network import build_model
from zerocheck.models.start import scramble


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
