"""One step of an optimizer of torch, run alone on whole vectors.

All of these optimizers are elementwise, so that a step of some elements, put together in a vector,
is that of the whole tensors. torch's kernels treat the last elements of a tensor otherwise than
full vectors of the processor, and a shard ends elsewhere than the vector here. So there are two
readings: the same bits, by torch's own kernel; or what operators with round-off moved at random
change (`execution/operator_noise.py`), which is an estimate. No bound is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...execution.operator_noise import StepNoise, round_off
from ...floating_point import Enclosure
from ..specification import UpdateElements


class UnshardedScalars(NamedTuple):
    """Options of one step.

    torch_class: the optimizer; options: of its group, without maximize; states: roles; taken: steps
    before this one; scalar_states: states that are one number, by name; new_scalar_states: the same
    before the first step; estimated: round-off may be another one.
    """

    torch_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    states: tuple[str, ...]
    taken: int
    scalar_states: Mapping[str, torch.Tensor]
    new_scalar_states: Mapping[str, torch.Tensor]
    estimated: bool

    def with_options(self, **options: Any) -> UnshardedScalars:
        """Return the scalars with other options."""
        return self._replace(options={**self.options, **options})


def run(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    old: Mapping[str, torch.Tensor],
    scalars: UnshardedScalars,
) -> dict[str, torch.Tensor]:
    """Return the states and `parameter` after one step, flat, in the dtype of the parameter.

    A parameter that took no step yet, and whose states are zeros, has none: torch makes them.
    """
    held = torch.nn.Parameter(parameter.detach().reshape(-1).clone())
    held.grad = gradient.reshape(-1).to(held.dtype)
    made: Any = scalars.torch_class
    optimizer = made([{**scalars.options, "params": [held]}])
    if scalars.taken or any(bool(state.any()) for state in old.values()):
        optimizer.state[held] = {
            "step": torch.tensor(float(scalars.taken)),
            **{role: state.reshape(-1).to(held.dtype).clone() for role, state in old.items()},
            **{name: value.clone() for name, value in scalars.scalar_states.items()},
        }
    with torch.enable_grad():
        optimizer.step()
    state = optimizer.state[held]
    return {**{role: state[role] for role in scalars.states}, "parameter": held.detach()}


def enclosures(
    e: UpdateElements,
    scalars: UnshardedScalars,
    *,
    gradient: torch.Tensor | None = None,
    old: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Enclosure]:
    """Enclose the states and the parameter after a step of some elements.

    gradient, old: in place of the right ones.
    """
    dtype = e.format.dtype
    p, g = e.parameter.to(dtype), (e.gradient if gradient is None else gradient).to(dtype)
    states = {role: state.to(dtype) for role, state in (e.old if old is None else old).items()}
    roles = (*scalars.states, "parameter")

    def made(scalars: UnshardedScalars) -> torch.Tensor:
        after = run(p, g, states, scalars)
        return torch.cat([after[role] for role in roles])

    exact = made(scalars)
    off = torch.zeros_like(exact, dtype=torch.float64)
    if scalars.estimated:
        # One operation after the other, so that the round-off of each is moved.
        slow = scalars.with_options(foreach=False, **_unfused(scalars.options))
        off = round_off(lambda: made(slow), exact, StepNoise)
    return {
        role: Enclosure(middle, width)
        for role, middle, width in zip(
            roles, torch.split(exact.double(), len(p)), torch.split(off, len(p)), strict=True
        )
    }


def _unfused(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"fused": False} if "fused" in options else {}
