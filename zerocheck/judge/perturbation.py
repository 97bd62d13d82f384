"""Perturbation of the reference by a round-off: of parameters, and of module outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerocheck_reference import unit_roundoff

from ..floating_point import NEXT
from .layout import ParameterLayout


def signs(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw 1 or -1 at random, the same for the same shape and seed."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, tuple(shape), generator=draw) * 2 - 1


def moved(flat: torch.Tensor, layout: ParameterLayout, replica: int) -> torch.Tensor:
    """Move each element of the flat parameters one unit of its own format up or down."""
    unit = torch.zeros(layout.size, dtype=torch.float64)
    for place in layout.places:
        unit[place.start : place.stop] = NEXT * place.format.u
    return (flat.double() * (1 + unit * signs(flat.shape, replica))).to(flat.dtype)


@contextmanager
def rounding_otherwise(model: nn.Module, replica: int) -> Iterator[None]:
    """Perturb the outputs of each innermost module, and their gradients, within the context.

    By the same signs each time that the module is called, as checkpointing needs it.
    """
    hooks = [
        module.register_forward_hook(_Moves(1_000 * (1 + replica) + number))
        for number, module in enumerate(model.modules())
        if not any(True for _ in module.children())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Moves:
    """Forward hook that perturbs the outputs of its module."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, _module: nn.Module, _given: Any, made: Any) -> Any:
        if isinstance(made, tuple):
            return tuple(self._moved(one) for one in made)
        return self._moved(made)

    def _moved(self, one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            return one
        unit = NEXT * unit_roundoff(one.dtype)
        factor = 1 + unit * signs(one.shape, self._seed).double()
        return one * factor.to(one.dtype).to(one.device)
