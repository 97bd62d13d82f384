"""torch optimizers inside the object that trains a model: wrappers, lists, user classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UsageError

DEPTH = 4
"""Wrappers around wrappers that are looked into."""

Applied = dict[torch.Tensor, torch.Tensor]
"""Parameters that an optimizer updated in a backward -> copies of the gradients that it had."""


class Optimizers:
    """Optimizers in `Built.optimizer`: one or several.

    Each is a torch optimizer, a wrapper of one (accelerate, fairscale, Fabric,
    ZeroRedundancyOptimizer), or an object of the user's own.

    given: the objects to step, in order. innermost: the torch optimizers inside, on this rank.
    inner: those whose states can be read; empty where none is visible. reduces: `step()` may reduce
    gradients. Raises UsageError for an object without `step()`.
    """

    def __init__(
        self, given: object, parameters: Iterable[torch.Tensor], *, reduced: bool = True
    ) -> None:
        """Find them.

        parameters: those of the wrapped model, as its optimizer may have them. reduced: gradients
        are reduced before `step()`. If not, a `step()` of the user's own may reduce them to parts,
        and have states of these parts: states in such an object itself are not read.
        """
        self.given: tuple[Any, ...] = tuple(given) if isinstance(given, list | tuple) else (given,)
        for one in self.given:
            if not callable(getattr(one, "step", None)):
                raise UsageError(
                    f"Built.optimizer is of type {type(one).__name__}, which has no step(); needed "
                    "is an optimizer, or a list of them"
                )
        if not self.given:
            raise UsageError("Built.optimizer is an empty list; needed is at least one optimizer")
        self.reduces = not reduced and any(not _steps_as_torch(one) for one in self.given)
        self._known = {id(parameter) for parameter in parameters}
        innermost = (inner for one in self.given for inner in _innermost(one, self._known))
        self.innermost: tuple[torch.optim.Optimizer, ...] = tuple(dict.fromkeys(innermost))
        self.inner = tuple(inner for inner in self.innermost if reduced or _steps_as_torch(inner))
        self.grouped = tuple(one for one in self.given if _groups(one) is not None)
        """Optimizers with parameter groups, which say how they update."""

    @property
    def holding(self) -> tuple[torch.optim.Optimizer, ...]:
        """Inner optimizers with a parameter, where there are several: torch saves no others."""
        some = [one for one in self.inner if any(group["params"] for group in one.param_groups)]
        return tuple(some) if len(self.inner) > 1 else self.inner

    @property
    def opaque(self) -> bool:
        """True if one is a class of the user's own, which may do anything in `step()`."""
        return len(self.grouped) < len(self.given)

    @property
    def has_some(self) -> bool:
        """False if groups have parameters, and none is of the model: they were made before it."""
        ids = {id(its) for group in self.groups() for its in group["params"]}
        return not ids or not ids.isdisjoint(self._known)

    def groups(self) -> Iterator[dict[str, Any]]:
        """Every visible parameter group, of wrappers and of their inner optimizers, once."""
        visited: set[int] = set()
        for one in (*self.grouped, *self.inner):
            for group in _groups(one) or ():
                if id(group) not in visited:
                    visited.add(id(group))
                    yield group

    def scheduled(self) -> Iterator[dict[str, Any]]:
        """Yield the parameter groups in which a user's scheduler sets the learning rate.

        Those of the given objects: to hand it on is up to them. Of an object without groups, those
        of the optimizers inside.
        """
        for one in self.given:
            groups = _groups(one)
            for inner in (one,) if groups is not None else _innermost(one, self._known):
                yield from _groups(inner) or ()

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state that this rank holds of a parameter, empty if there is none.

        That of all optimizers that have one, which is a mistake where these are several.
        """
        states = [one.state[parameter] for one in self.inner if one.state.get(parameter)]
        if len(states) == 1:
            return states[0]  # type: ignore[no-any-return]
        return {key: value for state in states for key, value in state.items()}

    def holder_of(self, parameter: torch.Tensor) -> torch.optim.Optimizer | None:
        """Return the optimizer that updates a parameter on this rank."""
        for one in self.inner:
            if any(parameter is p for group in one.param_groups for p in group["params"]):
                return one
        return None

    @contextmanager
    def applied(self) -> Iterator[Applied]:
        """Collect the gradients of parameters that are updated meanwhile, as torch's recipe does.

        It steps an optimizer for each parameter in the backward, and frees the gradient.
        """
        applied: Applied = {}

        def copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        applied[parameter] = parameter.grad.detach().clone()

        hooks = [inner.register_step_pre_hook(copy) for inner in self.inner]
        try:
            yield applied
        finally:
            for hook in hooks:
                hook.remove()

    def zero_grad(self, model: torch.nn.Module, *, set_to_none: bool) -> None:
        """Clear the gradients as each optimizer does; for one that cannot, those of the model."""
        for one in self.given:
            clear = getattr(one, "zero_grad", None)
            if clear is None:
                model.zero_grad(set_to_none)
            elif takes(clear, "set_to_none"):
                clear(set_to_none=set_to_none)
            else:
                clear()

    def step(self) -> None:
        """Update, one optimizer after the other."""
        for one in self.given:
            one.step()


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has an argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return every or name in parameters


def has_gradients(optimizer: Any) -> bool:
    """Return True if a parameter of an optimizer has a gradient, or its groups are not visible."""
    groups = _groups(optimizer)
    return groups is None or any(p.grad is not None for one in groups for p in one["params"])


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group. A rate that is a tensor stays one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _groups(optimizer: object) -> Sequence[dict[str, Any]] | None:
    """Return parameter groups in torch's form, or None."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) or not groups:
        return None
    return groups if all(isinstance(g, dict) and "params" in g for g in groups) else None


def _innermost(given: object, known: set[int], depth: int = DEPTH) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside an object over parameters of the model, or the object.

    known: ids of these parameters. A wrapper holds another optimizer in an attribute, or several in
    a list, tuple or dict.
    """
    found: list[torch.optim.Optimizer] = []
    attributes = vars(given) if depth and hasattr(given, "__dict__") else {}
    for value in attributes.values():
        held: Iterable[object] = (value,)
        if isinstance(value, dict):
            held = value.values()
        elif isinstance(value, list | tuple):
            held = value
        for one in held:
            if one is not given and _optimizes(one, known):
                found += _innermost(one, known, depth - 1)
    if found:
        return found
    return [given] if isinstance(given, torch.optim.Optimizer) else []


def _optimizes(value: object, known: set[int]) -> bool:
    """Return True for an optimizer whose parameters are all ones of the model.

    One of torch may have none: so is that of a rank that owns no parameter, which
    ZeroRedundancyOptimizer gives an empty tensor.
    """
    if isinstance(value, torch.Tensor) or not callable(getattr(value, "step", None)):
        return False
    groups = _groups(value)
    if groups is None:
        return False
    own = [parameter for group in groups for parameter in group["params"] if parameter.numel()]
    if not own:
        return isinstance(value, torch.optim.Optimizer)
    return all(id(parameter) in known for parameter in own)


def _steps_as_torch(optimizer: object) -> bool:
    """Return True if `step()` is one of torch's, which reduces no gradients."""
    module = getattr(getattr(type(optimizer), "step", None), "__module__", None)
    return f"{module}.".startswith("torch.")
