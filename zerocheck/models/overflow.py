"""Overflow of a microbatch: an infinite loss, or one element of one gradient alone.

Code that scales losses must find an overflow wherever it is. An infinite loss makes every gradient
infinite, so code that looks at one tensor, or at its own shard, finds it too. Where the case has
`training.overflow_in`, a single element of the gradient of that parameter is infinite or NaN, and
all else is finite.

It is planted in the graph of the model: the output of the module that has the parameter passes a
function that changes no value, and whose backward adds the element to the parameter's gradient. So
code under test calls an ordinary model, and the gradient arrives by whatever way it takes. The
function is put there by a global hook, which runs before those of wrappers, while the parameter is
whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from ..case.schema import Case
from ..case.shapes import parameter_shapes
from ..errors import Unsupported
from .batches import overflows
from .seeds import OVERFLOW, seed_of

VALUES = (math.inf, -math.inf, math.nan)
"""Values of the element, by the seed of the case."""

_MARK = "_zerocheck_overflow_in"
"""Attribute of the module that has the parameter: (name there, name in the model, shape)."""


def element_of(case: Case, size: int) -> tuple[int, float]:
    """Return (index, value) of the element that overflows, of a gradient of `size` elements."""
    chosen = seed_of(case.seed, OVERFLOW)
    return chosen // len(VALUES) % size, VALUES[chosen % len(VALUES)]


def mark(case: Case, model: nn.Module) -> nn.Module:
    """Mark the module with the parameter `training.overflow_in`; copies of it are marked too."""
    name = case.training.overflow_in
    if name is not None:
        owner, _, attribute = name.rpartition(".")
        shape = parameter_shapes(case.model)[name]
        vars(model.get_submodule(owner))[_MARK] = (attribute, name, shape)
    return model


class Overflow:
    """Overflow of a case, in the process of a rank or of the judge.

    Outside of `planted` a case with an overflow in one gradient has an infinite loss instead: what
    is planted takes memory, which no layout predicts.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._planting = False
        self._now = False

    def enter(self, *, step: int, rank: int, microbatch: int) -> None:
        """Enter a microbatch: what follows is its forward and backward."""
        self._now = overflows(self._case, step=step, rank=rank, microbatch=microbatch)

    def of_loss(self, loss: torch.Tensor, *, step: int, rank: int, microbatch: int) -> torch.Tensor:
        """Return the loss of the microbatch, infinite if that is how it overflows."""
        if self._planting:
            return loss
        infinite = overflows(self._case, step=step, rank=rank, microbatch=microbatch)
        return loss * math.inf if infinite else loss

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the element in forwards within the context, if the case has one."""
        if self._case.training.overflow_in is None:
            yield
            return
        handle = register_module_forward_hook(self._after)
        self._planting = True
        try:
            yield
        finally:
            handle.remove()
            self._planting = self._now = False

    def _after(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Return the output of a marked module with the element in the backward behind it.

        Raises Unsupported, on all ranks alike, where that is not possible.
        """
        marked = vars(module).get(_MARK)
        if marked is None or not torch.is_grad_enabled():
            return None
        attribute, name, shape = marked
        parameter = getattr(module, attribute, None)
        if not isinstance(parameter, torch.Tensor) or parameter.shape != shape:
            raise Unsupported(
                f"no overflow can be planted in the gradient of {name} alone, since it is not "
                f"whole after the forward of its {type(module).__name__} (training.overflow_in)"
            )
        leaves, form = pytree.tree_flatten(output)
        place = next((i for i, leaf in enumerate(leaves) if _is_differentiable(leaf)), None)
        if place is None:
            raise Unsupported(
                f"no overflow can be planted in the gradient of {name} alone, since the forward of "
                f"its {type(module).__name__} returns no tensor (training.overflow_in)"
            )
        if not self._now:
            return None
        index, value = element_of(self._case, parameter.numel())
        planted = _Planted.apply(leaves[place], parameter, index, value)  # type: ignore[no-untyped-call]
        leaves[place] = planted
        return pytree.tree_unflatten(leaves, form)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Planted(torch.autograd.Function):
    """Copy of a tensor, whose backward adds a value to one element of a parameter's gradient."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, parameter: torch.Tensor, index: int, value: float
    ) -> torch.Tensor:
        """Return a copy, and no view, so that code may change it in place."""
        ctx.planted = (parameter.shape, parameter.dtype, parameter.device, index, value)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the output, and that of the parameter: one element."""
        shape, dtype, device, index, value = ctx.planted
        planted = torch.zeros(shape, dtype=dtype, device=device)
        planted.view(-1)[index] = value
        return gradients[0], planted, None, None
