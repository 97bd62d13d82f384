"""One step of an optimizer, run alone on whole vectors, or on a whole parameter.

Most of torch's are elementwise, so that a step of some elements, put together in a vector, is that
of the whole tensors. torch's kernels treat the last elements of a tensor otherwise than full
vectors of the processor, and a shard ends elsewhere than the vector here. So there are two
readings: the same bits, by torch's own kernel; or what operators with round-off moved at random
change (`execution/operator_noise.py`), which is an estimate. No bound is derived.

Adafactor, and a class of the user's, may compute with whole parameters, and are given one in its
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ...case.schema import UserOptimizer
from ...execution.operator_noise import StepNoise, round_off
from ...floating_point import Enclosure
from ..specification import UpdateElements
from ..state_shape import ShapeOf, StateShape
from .part_norms import NormedPart, PartNorms


class UnshardedScalars(NamedTuple):
    """Options of one step.

    torch_class: the optimizer, None for a class that is not imported here; options: of its group,
    without maximize; states: roles; taken: steps before this one; scalar_states: states that are
    one number, by name; new_scalar_states: the same before the first step; estimated: round-off may
    be another one; state_shape: see `UpdateRule`; whole: it computes with whole parameters; part:
    norms over a parameter are those of this part of it, for the diagnosis; user: what is known of a
    class of the user's; elsewhere: `enclosures`, where another process runs it.
    """

    torch_class: type[torch.optim.Optimizer] | None
    options: Mapping[str, Any]
    states: tuple[str, ...]
    taken: int
    scalar_states: Mapping[str, torch.Tensor]
    new_scalar_states: Mapping[str, torch.Tensor]
    estimated: bool
    state_shape: ShapeOf
    whole: bool
    part: NormedPart | None = None
    user: UserOptimizer | None = None
    elsewhere: Callable[..., dict[str, Enclosure]] | None = None

    def shapes(self, dims: int) -> dict[str, StateShape]:
        """Return the shapes of the states that a parameter with so many dims has."""
        found = {role: self.state_shape(role, dims) for role in self.states}
        return {role: shape for role, shape in found.items() if shape is not None}

    def step_count(self) -> dict[str, Any]:
        """Return the step count before this step, as it is in the state."""
        if self.user is None:
            return {"step": torch.tensor(float(self.taken))}
        if self.user.count in ("none", "group"):
            return {}
        return {"step": COUNTS[self.user.count](self.taken)}

    def group_count(self) -> dict[str, Any]:
        """Return the step count before this step, as it is in the parameter group, if it is."""
        counts = self.user is not None and self.user.count == "group" and self.taken > 0
        return {"step": self.taken} if counts else {}

    def with_options(self, **options: Any) -> UnshardedScalars:
        """Return the scalars with other options."""
        return self._replace(options={**self.options, **options})

    def one_by_one(self) -> UnshardedScalars:
        """Return the scalars of a kernel that computes one operation after the other."""
        kernels = [name for name in ("foreach", "fused") if name in self.options]
        return self.with_options(**dict.fromkeys(kernels, False))


def state_dtype(user: UserOptimizer | None, role: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a state for a parameter of the given dtype: fp32 if it is wide."""
    states = () if user is None else user.states
    return torch.float32 if any(one.wide for one in states if one.name == role) else dtype


COUNTS: Mapping[str, Callable[[int], Any]] = {
    "int": int,
    "group": int,
    "float": float,
    "tensor": lambda count: torch.tensor(float(count)),
}
"""Step counts as a state has them, by their type."""


def run(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    old: Mapping[str, torch.Tensor],
    scalars: UnshardedScalars,
    *,
    began: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the states, expanded, and `parameter` after one step, in the shape of the parameter.

    A parameter that took no step yet, and whose states are zeros, has none, unless it `began`: the
    optimizer makes them.
    """
    held = torch.nn.Parameter(parameter.detach().clone())
    held.grad = gradient.to(held.dtype)
    made: Any = scalars.torch_class
    shapes = scalars.shapes(held.dim())
    optimizer = made([{**scalars.options, **scalars.group_count(), "params": [held]}])
    if began or scalars.taken or any(bool(state.any()) for state in old.values()):
        optimizer.state[held] = {
            **scalars.step_count(),
            **{
                role: shape.contracted(old[role].to(state_dtype(scalars.user, role, held.dtype)))
                for role, shape in shapes.items()
            },
            **{name: value.clone() for name, value in scalars.scalar_states.items()},
        }
    part = PartNorms(held.shape, scalars.part) if scalars.part is not None else nullcontext()
    with torch.enable_grad(), part:
        optimizer.step()
    state = optimizer.state[held]
    after = {role: shape.expanded(state[role], held.shape) for role, shape in shapes.items()}
    return {**after, "parameter": held.detach()}


def enclosures(e: UpdateElements, scalars: UnshardedScalars) -> dict[str, Enclosure]:
    """Enclose the states and the parameter after a step of some elements."""
    if scalars.elsewhere is not None:
        return scalars.elsewhere(e, scalars)
    dtype = e.format.dtype

    def shaped(vector: torch.Tensor) -> torch.Tensor:
        return e.shaped(vector) if scalars.whole or scalars.user is not None else vector

    p = shaped(e.parameter.to(dtype))
    g = shaped(e.gradient.to(dtype))
    states = {
        role: shaped(state.to(state_dtype(scalars.user, role, dtype)))
        for role, state in e.old.items()
    }
    roles = (*scalars.shapes(p.dim()), "parameter")

    def made(scalars: UnshardedScalars) -> torch.Tensor:
        after = run(p, g, states, scalars, began=e.held)
        return torch.cat([after[role].reshape(-1) for role in roles])

    exact = made(scalars)
    off = torch.zeros_like(exact, dtype=torch.float64)
    if scalars.estimated:
        # One operation after the other, so that the round-off of each is moved.
        slow = scalars.one_by_one()
        pools = [p.numel()] * len(roles) if scalars.whole else ()
        off = round_off(lambda: made(slow), exact, partial(StepNoise, parts=e.parts), pools)
    return {
        role: Enclosure(middle, width)
        for role, middle, width in zip(
            roles, torch.split(exact.double(), p.numel()), torch.split(off, p.numel()), strict=True
        )
    }
