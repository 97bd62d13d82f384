"""Inspection of the user's optimizer class: its states, and whether it can be judged.

It runs in a rank process. A class is judged by running it alone on whole parameters, from a state
that was observed: so its step must follow from the parameter, its gradient, its states and the step
count, and from nothing else. That is tried here, and what differs is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ...case.schema import RESERVED, CountKind, UserOptimizer, UserState
from ...catalogue import check_factory
from ...errors import UsageError
from ...user_code import import_user_code
from ..state_shape import shape_kind

SHAPE = (24, 40)
"""Shape of the matrix that is tried."""
LARGE = (256, 256)
"""Shape of a matrix that is large to an optimizer: 8-bit ones quantize from 4,096 elements on."""
STEPS = 3
LARGER = 2.0**8
"""Factor on gradients that shows by which power of them a state grows."""
CLOSE = 2.0**-10
"""Difference of two updates that round-off explains, as `OptimizerTrial.close`."""
WIDTHS = (torch.float32, torch.bfloat16)


def inspect_optimizer(location: str) -> UserOptimizer:
    """Inspect the class at a location. Runs the user's code, and keeps torch's random state.

    Raises UsageError, with what is given and what is needed, for a class that cannot be judged.
    """
    check_factory(location, "optimizer")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return _Inspection(location).result()


class _Tried(NamedTuple):
    """Parameters after some steps, with their states and the group."""

    parameters: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]
    group: Mapping[str, Any]


class _Inspection:
    def __init__(self, location: str) -> None:
        self.location = location
        found = import_user_code(location)
        if not inspect.isclass(found) or not issubclass(found, torch.optim.Optimizer):
            what = found.__name__ if inspect.isclass(found) else f"a {type(found).__name__}"
            raise UsageError(
                f"--optimizer {location}: it is {what}; needed is a subclass of "
                "torch.optim.Optimizer"
            )
        self.made = found
        self.name = found.__name__

    def result(self) -> UserOptimizer:
        matrix = self._starts(SHAPE)
        once, again = self._tried(matrix), self._tried(matrix)
        if not _same(once, again):
            raise self._refused(
                "is not deterministic: two runs of the same steps differ, and a reference could "
                "not say which is right"
            )
        names, count = self._roles(once)
        large, _ = self._roles(self._tried(self._starts(LARGE)))
        if large != names:
            raise self._refused(
                f"has the states {', '.join(large) or 'none'} of a parameter of shape {LARGE}, and "
                f"{', '.join(names) or 'none'} of one of shape {SHAPE}; needed are the same"
            )
        if self._group_counts(once):
            if count != "none":
                raise self._refused("counts steps in its state and in its parameter group")
            count = "group"
        self._group_stays(once, count)
        self._alone(matrix)
        defaults = once.group
        if "lr" not in defaults:
            raise self._refused("has no option lr; needed is one, which schedules set")
        larger = self._tried(matrix, scale=LARGER)
        narrow: _Tried | None = None
        with suppress(UsageError):
            narrow = self._tried([one.bfloat16() for one in matrix])
        states = tuple(self._state(name, once, larger, narrow or once) for name in names)
        self._check_of_three_dims(states)
        return UserOptimizer(
            location=self.location,
            states=states,
            count=count,
            elementwise=self._elementwise(matrix[0], once.parameters[0]),
            weight_decay="weight_decay" in defaults,
            maximize="maximize" in defaults,
            bf16=narrow is not None,
        )

    def _starts(self, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """Return a matrix and a vector: optimizers may tell them apart."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.empty(one).uniform_(-0.25, 0.25, generator=generator)
            for one in (shape, shape[:1])
        ]

    def _gradients(self, starts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Draw the gradients of STEPS steps; those of a parameter do not depend on others."""
        draws = [torch.Generator().manual_seed(number) for number in range(len(starts))]
        return [
            [
                torch.empty(one.shape).normal_(generator=draw)
                for one, draw in zip(starts, draws, strict=True)
            ]
            for _ in range(STEPS)
        ]

    def _tried(
        self,
        starts: Sequence[torch.Tensor],
        scale: float = 1.0,
        given: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> _Tried:
        """Take STEPS steps with drawn gradients, of the size `scale`, or with given ones."""
        held = [torch.nn.Parameter(one.clone()) for one in starts]
        gradients = self._gradients(starts) if given is None else given
        torch.manual_seed(0)
        make: Any = self.made
        try:
            optimizer = make([{"params": held}])
        except Exception as error:
            raise self._refused(
                f"cannot be made from parameters alone: {type(error).__name__}: {error}; needed is "
                "a default for each of its options"
            ) from error
        for of_step in gradients:
            for one, gradient in zip(held, of_step, strict=True):
                one.grad = (scale * gradient).to(one.dtype)
            self._step(optimizer)
        states = [dict(optimizer.state.get(one, {})) for one in held]
        return _Tried([one.detach() for one in held], states, dict(optimizer.param_groups[0]))

    def _step(self, optimizer: Any) -> None:
        try:
            optimizer.step()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            parameter = inspect.signature(optimizer.step).parameters.get("closure")
            if parameter is not None and parameter.default is inspect.Parameter.empty:
                raise self._refused(
                    "needs a closure in step(), which calls the model again; needed is a step from "
                    "gradients that are there"
                ) from error
            raise self._refused(f"fails on a matrix and a vector alone: {text}") from error

    def _roles(self, tried: _Tried) -> tuple[list[str], CountKind]:
        """Return the names of the states, and the type of the count."""
        names: dict[str, None] = {}
        counts: set[CountKind] = set()
        for start, state in zip(tried.parameters, tried.states, strict=True):
            for name, value in state.items():
                if name == "step":
                    counts.add(self._count(value))
                elif name in RESERVED:
                    raise self._refused(
                        f"has the state {name!r}, a name that zerocheck has for something else "
                        f"({', '.join(sorted(RESERVED))}); needed is another one"
                    )
                elif shape_kind(value, start.shape) is not None:
                    kind = value.dtype if type(value) is torch.Tensor else type(value).__name__
                    if kind not in WIDTHS:
                        raise self._refused(
                            f"has the state {name!r} of dtype {kind}, of a parameter of shape "
                            f"{tuple(start.shape)}: quantized states are not judged; needed are "
                            "torch.float32 or torch.bfloat16"
                        )
                    names[name] = None
                else:
                    raise self._refused(
                        f"has the state {name!r}, {_words(value)}, of a parameter of shape "
                        f"{tuple(start.shape)}; needed are states of the parameter's shape, of "
                        "its rows or columns, or of one number, and a count named 'step'"
                    )
        if len(counts) > 1:
            raise self._refused(f"counts steps as {' and as '.join(sorted(counts))}")
        return list(names), counts.pop() if counts else "none"

    def _state(self, name: str, once: _Tried, larger: _Tried, narrow: _Tried) -> UserState:
        """Describe a state by what it was after steps with gradients of size 1, and of LARGER."""

        def largest(tried: _Tried) -> float:
            return max(float(one[name].abs().max()) for one in tried.states if name in one)

        size, grown = largest(once), largest(larger)
        ratio = grown / size if size and grown else 1.0
        signed = any(bool((one[name] < 0).any()) for one in once.states if name in one)
        (of_matrices, keeps), (of_vectors, also) = (
            shape_kind(state.get(name), parameter.shape) or ("none", False)
            for parameter, state in zip(once.parameters, once.states, strict=True)
        )
        reduced = [kind for kind in (of_matrices, of_vectors) if kind not in ("none", "whole")]
        if len(reduced) > 1 and keeps != also:
            raise self._refused(
                f"has the state {name!r} with dims of size 1 for a matrix, and without them for a "
                "vector, or the other way round; needed is one form for both"
            )
        return UserState(
            name=name,
            size=size,
            power=min(max(round(math.log(ratio, LARGER)), 0), 4) if ratio > 0 else 0,
            signed=signed,
            wide=narrow is not once
            and all(one[name].dtype == torch.float32 for one in narrow.states if name in one),
            of_matrices=of_matrices,
            of_vectors=of_vectors,
            keeps_dims=keeps or also,
        )

    def _check_of_three_dims(self, states: Sequence[UserState]) -> None:
        """Check that a factored state of more dims is that of the last two, if any is factored."""
        if all(one.of_matrices in ("whole", "none") for one in states):
            return
        shape = (3, *SHAPE)
        try:
            tried = self._tried(self._starts(shape)[:1])
        except UsageError:
            return  # it takes matrices alone, which its steps show
        for one in states:
            held = tried.states[0].get(one.name)
            kind, _ = shape_kind(held, shape) or ("none", False)
            if kind != one.of_matrices:
                found = "no state" if held is None else f"the state {one.name!r}, {_words(held)},"
                raise self._refused(
                    f"has {found} of a parameter of shape {shape}; needed is {one.name!r} for its "
                    "last two dims, as for a matrix"
                )

    def _count(self, value: Any) -> CountKind:
        if isinstance(value, torch.Tensor) and value.dim() == 0 and float(value) == STEPS:
            return "tensor"
        if isinstance(value, int | float) and value == STEPS:
            return "int" if isinstance(value, int) else "float"
        raise self._refused(
            f"has the state 'step', {_words(value)}, after {STEPS} steps; needed is their number, "
            "as an int, a float or a 0-d tensor"
        )

    def _group_counts(self, tried: _Tried) -> bool:
        """Return True if the parameter group counts steps, as an int that is called `step`."""
        value = tried.group.get("step")
        return isinstance(value, int) and not isinstance(value, bool) and value == STEPS

    def _group_stays(self, tried: _Tried, count: CountKind) -> None:
        """Check that nothing else in the parameter group changes from step to step."""
        held = [torch.nn.Parameter(one.clone()) for one in tried.parameters]
        make: Any = self.made
        before = make([{"params": held}]).param_groups[0]
        for name, value in tried.group.items():
            if name == "params" or (name == "step" and count == "group"):
                continue
            if name not in before or not _equal(value, before[name]):
                raise self._refused(
                    f"keeps {name!r} in its parameter group and changes it in a step; needed are "
                    "states of parameters, and a number of steps named 'step'"
                )

    def _alone(self, starts: Sequence[torch.Tensor]) -> None:
        """Check that the step of a parameter does not depend on other parameters."""
        together = self._tried(starts).parameters[0]
        if not torch.equal(together, self._tried(starts[:1]).parameters[0]):
            raise self._refused(
                "updates a parameter otherwise when there are others next to it; needed is a step "
                "that follows from one parameter, its gradient and its states"
            )

    def _elementwise(self, start: torch.Tensor, after: torch.Tensor) -> bool:
        """Return True if the flat parts of a matrix take the steps of the matrix."""
        size = start.numel() // 3  # no part is a row, or a number of them

        def parts(matrix: torch.Tensor) -> list[torch.Tensor]:
            return [one.clone() for one in torch.split(matrix.reshape(-1), size + 1)]

        given = [parts(of_step[0]) for of_step in self._gradients([start])]
        try:
            made = torch.cat(list(self._tried(parts(start), given=given).parameters))
        except UsageError:
            return False
        way = float((after - start).abs().max())
        return float((made.view_as(after) - after).abs().max()) <= CLOSE * way

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"--optimizer {self.location}: {self.name} {why}")


def _same(one: _Tried, other: _Tried) -> bool:
    return all(
        torch.equal(first, second)
        for first, second in zip(one.parameters, other.parameters, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"of type {type(value).__name__}"
