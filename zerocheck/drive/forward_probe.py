"""Probe of a model's forward for the properties that decide the last bits of a local gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..execution.alignment import lies

_PLAIN = (torch.Tensor, nn.Parameter)


class ForwardProbe:
    """Probe of a model's forward, for the properties that decide bits.

    Address (see `lies`) and strides of parameters, modules whose inputs a hook passes through a
    node, modules whose parameters are recreated, as views, at each call, and modules with reentrant
    checkpointing.

    It uses torch's global forward hooks: the pre-hook runs ahead of the model's own hooks, the
    post-hook runs before FSDP's releases gathered parameters. No hook is put on the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Build the probe before `model` is wrapped: wrapping keeps the module objects."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._frozen = {name for p, name in names.items() if not p.requires_grad}
        self._strides = {name: parameter.stride() for parameter, name in names.items()}
        self._modules = {module: name for name, module in model.named_modules()}
        self._parameters: dict[nn.Module, dict[str, str]] = {
            module: {
                attribute: names[parameter]
                for attribute, parameter in module._parameters.items()
                if parameter is not None
            }
            for module in self._modules
        }
        self._given: dict[nn.Module, Any] = {}
        self._without_graph: nn.Module | None = None
        self.forget()

    def forget(self) -> None:
        """Reset for the next step. restrided: the modules passed through that change strides."""
        self.misaligned: dict[str, int] = {}
        self.strides: dict[str, tuple[int, ...]] = {}
        self.passed_through: set[str] = set()
        self.restrided: set[str] = set()
        self.tracked: set[str] = set()
        self.viewed: set[str] = set()
        self.cast: set[str] = set()
        self.recomputed: set[str] = set()
        self.hooked = False
        self._views: dict[tuple[nn.Module, str], object] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record properties within the context."""
        handles = (
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._given.clear()
            self._views.clear()

    def _before(self, module: nn.Module, given: Any) -> None:
        name = self._modules.get(module)
        if name is None:
            return
        self._given[module] = given
        self.hooked = self.hooked or any(map(_is_hooked, given))
        if not name:  # the whole model: a new forward
            self._views.clear()
            self._without_graph = None
        if self._without_graph is None and not torch.is_grad_enabled():
            self._without_graph = module
            self.recomputed.add(name)

    def _after(self, module: nn.Module, used: Any, result: Any) -> None:
        name = self._modules.get(module)
        if name is None:
            return
        if module is self._without_graph:
            self._without_graph = None
        elif _is_checkpoint(result, used):
            # What runs without a graph inside is this module's forward.
            inside = {one for one in self.recomputed if not name or one.startswith(f"{name}.")}
            self.recomputed = self.recomputed - inside | {name}
        given = self._given.pop(module, ())
        for before, after in zip(given, used, strict=False):
            passed = isinstance(after, torch.Tensor) and isinstance(
                after.grad_fn, BackwardCFunction
            )
            if passed and after is not before:
                self.passed_through.add(name)
                if after.stride() != before.stride():
                    self.restrided.add(name)
            dtypes = {one.dtype for one in (before, after) if isinstance(one, torch.Tensor)}
            if len(dtypes) > 1:
                self.cast.add(name)
        for attribute, parameter in self._parameters[module].items():
            tensor = getattr(module, attribute, None)
            if tensor is not None and type(tensor) in _PLAIN:
                offset = lies(tensor)
                if offset:
                    self.misaligned[parameter] = offset
                if tensor.requires_grad and parameter in self._frozen:
                    self.tracked.add(parameter)
                if tensor.stride() != self._strides[parameter]:
                    self.strides[parameter] = tensor.stride()
                node = tensor.grad_fn
                if node is not None and self._views.setdefault((module, attribute), node) != node:
                    self.viewed.add(name)


def _is_hooked(value: Any) -> bool:
    """Return True if the gradient of an activation passes a hook that may change its strides.

    A hook that is not torch's own, and is not annotated to return nothing. No graph shows such a
    change.
    """
    hooks = getattr(value, "_backward_hooks", None) if isinstance(value, torch.Tensor) else None
    called = [getattr(hook, "func", hook) for hook in (hooks or {}).values()]
    return any(
        not str(getattr(one, "__module__", "")).startswith("torch.")
        and getattr(one, "__annotations__", {}).get("return", "") not in (None, "None")
        for one in called
    )


def _is_checkpoint(result: Any, given: Any) -> bool:
    """Return True if a module's output comes from one reentrant checkpoint of just its inputs."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    if node is None or node.name() != "CheckpointFunctionBackward":
        return False
    tensors = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
    nodes = {torch.autograd.graph.get_gradient_edge(one).node for one in tensors}
    return all(edge is None or edge in nodes for edge, _ in node.next_functions)
