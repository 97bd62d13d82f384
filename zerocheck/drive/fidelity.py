"""Properties of a model's execution that decide the last bits of a local gradient.

The judge applies the following to the reference, so that local gradients agree bit for bit:

- The address of a parameter modulo 64 bytes: BLAS takes another path for weights that are not
  aligned. On a GPU modulo 256: that is the alignment that torch reports to cuBLASLt, which chooses
  by it, and no other kernel looks further. GPU allocations are aligned to 512.
- The strides of a parameter: a flat buffer makes a transposed matrix contiguous, and BLAS takes
  another path for it.
- The modules whose inputs pass through one more autograd node, with which FSDP2 detects the end of
  a backward. The gradient of an input that is used twice inside and once outside is then summed as
  a + (b + c) instead of (a + b) + c; and `view_as` in such a node changes the stride of a dim of
  size 1, by which later kernels choose their layout. DeepSpeed's node has `detach`, which keeps
  strides.
- The modules whose parameters are recreated at each call, as views of a flat one, as in FSDP1.
  Where a module is called twice and uses a weight several times in a call, its gradient is then
  summed as (a + b) + (c + d) instead of ((a + b) + c) + d.
- The modules whose inputs are cast to the compute dtype, as in units of FSDP2 with mixed precision.
- The modules that run without a graph in the forward, and again with one in the backward: reentrant
  activation checkpointing. The gradient of such a module's input is accumulated in a separate leaf,
  which gives it the strides of that input; earlier kernels, such as that of a batch norm, add in
  another order for other strides.
- The frozen parameters that autograd tracks nevertheless, as FSDP1 does with those that share a
  flat parameter with trainable ones. torch.matmul folds its inputs by what requires gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.checkpoint import checkpoint

ALIGNMENT = 64
"""Bytes; the widest vector that CPU kernels load at once."""
GPU_ALIGNMENT = 256
"""Bytes; the largest alignment that a choice of kernels on a GPU depends on."""


def lies(tensor: torch.Tensor) -> int:
    """Return a tensor's address modulo the alignment that kernels of its device use, in bytes."""
    return tensor.data_ptr() % alignment(tensor.device)


def alignment(device: torch.device) -> int:
    """Return ALIGNMENT or GPU_ALIGNMENT, by the device."""
    return ALIGNMENT if device.type == "cpu" else GPU_ALIGNMENT


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


_PLAIN = (torch.Tensor, nn.Parameter)


def place(
    tensor: torch.Tensor, offset: int, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Copy a tensor on its device to an address for which `lies` is `offset`. Same shape and dtype.

    strides: in elements; None for those of a contiguous tensor.
    """
    size, unit = tensor.element_size(), alignment(tensor.device)
    if strides is None:
        strides = torch.empty(tensor.shape, device="meta").stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True) if n)
    spare = torch.empty(extent + 2 * unit // size, dtype=tensor.dtype, device=tensor.device)
    start = ((offset - spare.data_ptr()) % unit) // size
    return spare.as_strided(tensor.shape, strides, start).copy_(tensor)


class _PassThrough(torch.autograd.Function):
    """Autograd node that passes its inputs through, like FSDP2's."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Detached(_PassThrough):
    """Autograd node that passes its inputs through and keeps their strides, like DeepSpeed's."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.detach() for one in inputs)


def pass_through(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook for the reference: pass tensors that need a gradient through a node.

    The node gives dims of size 1 other strides.
    """
    return _passed(_PassThrough, given)


def pass_detached(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook for the reference: pass tensors through a node that keeps strides."""
    return _passed(_Detached, given)


def _passed(node: type[_PassThrough], given: tuple[Any, ...]) -> tuple[Any, ...]:
    needing = [
        position
        for position, value in enumerate(given)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if not needing:
        return given
    passed = list(given)
    outputs = node.apply(*(given[position] for position in needing))  # type: ignore[no-untyped-call]
    for position, value in zip(needing, outputs, strict=True):
        passed[position] = value
    return tuple(passed)


def cast_inputs(dtype: torch.dtype, _: object, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook for the reference, given a dtype: cast floating-point inputs to it."""
    return tuple(
        one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in given
    )


def recomputing(module: nn.Module, forward: Callable[..., Any], *given: Any) -> Any:
    """Forward of a module for the reference, with reentrant checkpointing.

    Used where an input needs a gradient. Its buffers are those of one forward, since updating them
    twice would be wrong.
    """
    needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in given)
    if not (needed and torch.is_grad_enabled()):
        return forward(*given)

    def once(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given)
        before = [buffer.clone() for buffer in module.buffers()]
        result = forward(*given)
        for buffer, kept in zip(module.buffers(), before, strict=True):
            buffer.data.copy_(kept)  # not seen by autograd, which saved it
        return result

    return checkpoint(once, *given, use_reentrant=True)


def as_views(module: nn.Module, _: tuple[Any, ...]) -> None:
    """Forward pre-hook for the reference: replace the module's parameters by views."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[name]
            setattr(module, name, parameter.view_as(parameter))


def as_parameters(parameters: Mapping[str, nn.Parameter], module: nn.Module, *_: Any) -> None:
    """Forward hook that undoes `as_views`. parameters: the module's own by name, in their order."""
    for name, parameter in parameters.items():
        module.__dict__.pop(name, None)
        setattr(module, name, parameter)
