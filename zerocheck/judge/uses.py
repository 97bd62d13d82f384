"""Parts of a gradient that single uses of a parameter in a forward give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Use(NamedTuple):
    """Use of a parameter: a call of a module that has it, and what the backward gives for it."""

    module: str
    """Name of the module."""
    number: int
    """Place among all calls of the forward."""
    gradient: torch.Tensor
    """Flat, fp32."""


class UseNotes:
    """Record of the uses of each parameter, call by call, for one forward and backward at a time.

    Each module with parameters computes with views of them, whose gradients are recorded. Modules
    that keep lists of their parameters, such as recurrent ones, show no uses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._modules = {
            module: (name, {key: one for key, one in module._parameters.items() if one is not None})
            for name, module in model.named_modules()
            if any(one is not None for one in module._parameters.values())
            and not isinstance(module, nn.RNNBase)
        }
        self._calls = 0
        self._found: dict[str, list[Use]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record within the context."""
        hooks: list[RemovableHandle] = []
        for module in self._modules:
            hooks.append(module.register_forward_pre_hook(self._before))
            hooks.append(module.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def taken(self) -> dict[str, list[Use]]:
        """Return the uses of each parameter since the last time, in the order of the forward."""
        found, self._found, self._calls = self._found, {}, 0
        return {name: sorted(uses, key=lambda use: use.number) for name, uses in found.items()}

    def _before(self, module: nn.Module, _: Any) -> None:
        name, parameters = self._modules[module]
        self._calls += 1
        for key, parameter in parameters.items():
            used = module._parameters.pop(key, None)
            used = module.__dict__.get(key, parameter) if used is None else used
            if not used.requires_grad:
                module._parameters[key] = parameter
                continue
            view = used.view_as(used)
            view.register_hook(self._note(self._names[id(parameter)], name, self._calls))
            module.__dict__[key] = view

    def _note(self, parameter: str, module: str, number: int) -> Any:
        def note(gradient: torch.Tensor) -> None:
            flat = gradient.detach().reshape(-1).to("cpu", torch.float32, copy=True)
            self._found.setdefault(parameter, []).append(Use(module, number, flat))

        return note

    def _after(self, module: nn.Module, *_: Any) -> None:
        _, parameters = self._modules[module]
        for key, parameter in parameters.items():
            module.__dict__.pop(key, None)
            module._parameters.pop(key, None)  # so that all come back in their order
            module._parameters[key] = parameter


class UsedParts(NamedTuple):
    """Parts of a parameter's local gradients, one for each of its uses."""

    modules: tuple[str, ...]
    """Module of each use, in the order of the forward."""
    gradients: torch.Tensor
    """(uses, ranks, microbatches, elements) fp32."""


def parts_of(
    noted: Mapping[tuple[int, int], Mapping[str, Sequence[Use]]], world: int, count: int
) -> dict[str, UsedParts]:
    """Return the parts of the parameters that have several uses.

    noted: uses of each parameter by (rank, microbatch). Uses of different ranks are one if they are
    the same call of the same module.
    """
    found: dict[str, dict[tuple[str, int], dict[tuple[int, int], torch.Tensor]]] = {}
    for where, parameters in noted.items():
        for name, uses in parameters.items():
            calls: dict[str, int] = {}
            for use in uses:
                calls[use.module] = calls.get(use.module, 0) + 1
                key = use.module, calls[use.module]
                found.setdefault(name, {}).setdefault(key, {})[where] = use.gradient
    made: dict[str, UsedParts] = {}
    for name, parts in found.items():
        if len(parts) < 2:
            continue
        size = len(next(iter(next(iter(parts.values())).values())))
        gradients = torch.zeros(len(parts), world, count, size)
        for number, of in enumerate(parts.values()):
            for (rank, microbatch), gradient in of.items():
                gradients[number, rank, microbatch] = gradient
        made[name] = UsedParts(tuple(module for module, _ in parts), gradients)
    return made
