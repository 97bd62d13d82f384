"""Properties of a rank's execution, applied to the reference so that local gradients agree in bits.

- The address of a parameter modulo an alignment: see execution/alignment.py.
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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


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


def cast_outputs(dtype: torch.dtype | None, outputs: Any) -> Any:
    """Return what a model gave with its floating-point tensors cast, as FSDP2's `output_dtype`."""

    def cast(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    return tree_map(cast, outputs)


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
