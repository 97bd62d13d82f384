"""Between the reference's AdamWState in torch and the judging of bounds.py in numpy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerocheck_reference import AdamWOptions, AdamWState

from .bounds import FLOAT32, FLOAT64, State, ratios
from .oracle import Scalars


def mapped(state: AdamWState, function: Callable[[Tensor], Tensor]) -> AdamWState:
    """The state with each tensor replaced by `function` of it."""
    top = state.max_exp_avg_sq
    return AdamWState(
        function(state.parameter),
        function(state.exp_avg),
        function(state.exp_avg_sq),
        state.step,
        None if top is None else function(top),
    )


def tensors(state: AdamWState) -> list[Tensor]:
    """The tensors of the state, in its order."""
    return [x for x in state if isinstance(x, Tensor)]


def optimizer_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> AdamWState | None:
    """A copy of what torch's AdamW holds for one parameter; None before its first step."""
    held = optimizer.state.get(parameter)
    if not held:
        return None
    top = held.get("max_exp_avg_sq")
    return AdamWState(
        parameter.detach().clone(),
        held["exp_avg"].clone(),
        held["exp_avg_sq"].clone(),
        int(held["step"].item()),
        None if top is None else top.clone(),
    )


def judge(before: AdamWState, g: Tensor, o: AdamWOptions, after: AdamWState) -> dict[str, float]:
    """Largest error / bound of each role, in the format of the state; see `bounds.ratios`."""
    form = FLOAT64 if before.parameter.dtype == torch.float64 else FLOAT32
    seen = Scalars(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, before.step + 1, o.maximize)
    return ratios(_arrays(before), g.numpy(), seen, _arrays(after), form)


def holds(found: dict[str, float]) -> bool:
    """No error above its bound, and no NaN."""
    return all(ratio <= 1.0 for ratio in found.values())


def assert_judged(
    before: AdamWState, g: Tensor, o: AdamWOptions, after: AdamWState, what: object = ""
) -> None:
    """The step lies within the bounds, and is counted."""
    found = judge(before, g, o, after)
    assert holds(found), (what, found)
    assert after.step == before.step + 1


def _arrays(state: AdamWState) -> State:
    top = state.max_exp_avg_sq
    return State(
        state.parameter.numpy(),
        state.exp_avg.numpy(),
        state.exp_avg_sq.numpy(),
        None if top is None else top.numpy(),
    )
