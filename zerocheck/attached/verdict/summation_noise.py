"""Noise of sums over samples: gradients of outputs, moved as a sum over samples may round.

The gradient of a bias is a sum over all positions of the gradient of the module's output, and that
of a weight one of products with it. Kernels take such a sum in any order: a compiler another one
than the reference. How far it can round does not show when parameters are moved: the bias of the
last layer, whose output's gradient is given, does not move at all. So each term that comes to the
model is moved by what the serial sum up to it rounds: u * abs(S_k), up or down at random, with
S_k = g_1 + ... + g_k. That is the order with the largest error, and it is the sum of those of its
partial sums (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2).
Kernels add bf16 numbers in fp32, so that u is never more than fp32's.

What is moved are the gradients that are given for the outputs. Where one is a scalar, as of a model
that returns its loss, it is also the gradient of what its last module with parameters returned. Not
moved is what comes to a parameter that the outermost module of such a model uses by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...judge.pieces import AT_ONCE
from ..record.forwards import tensors_in

Pair = tuple[torch.Tensor, torch.Tensor]
"""An output, and the gradient that is given for it."""


class SumNoise:
    """Moves of the gradients that come to a model, by `unit` times the sums up to each element."""

    def __init__(self, unit: float, number: int) -> None:
        """Draw up and down from the seed `number`, on each device."""
        self._unit, self._number = unit, number
        self._draws: dict[torch.device, torch.Generator] = {}
        self._last: list[torch.Tensor] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[SumNoise]:
        """Note what the last module with parameters returned."""

        def note(_: nn.Module, __: Any, output: Any) -> None:
            made = [one for one in tensors_in(output).values() if one.dim() and not one.is_leaf]
            self._last = made or self._last

        having = [one for one in model.modules() if next(one.parameters(False), None) is not None]
        handles = [one.register_forward_hook(note) for one in having]
        try:
            yield self
        finally:
            self._last = []
            for handle in handles:
                handle.remove()

    def moved(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Return the pairs with gradients moved; by a scalar, move those of the last module."""
        if any(not gradient.dim() for _, gradient in pairs):
            for one in self._last:
                one.register_hook(self._moved)  # type: ignore[no-untyped-call]
        return [(output, self._moved(gradient)) for output, gradient in pairs]

    def _moved(self, gradient: torch.Tensor) -> torch.Tensor:
        """Move as sums over all dims but the last, and over all but dim 1 where there are three."""
        device = gradient.device
        if device not in self._draws:
            self._draws[device] = torch.Generator(device).manual_seed(self._number)
        for dim in (1, -1) if gradient.dim() > 2 else (-1,):
            gradient = as_summed(gradient, dim, self._unit, self._draws[device])
        return gradient


def as_summed(gradient: torch.Tensor, dim: int, unit: float, draw: torch.Generator) -> torch.Tensor:
    """Return a gradient with each element moved by `unit` times the sum up to it, up or down.

    Sums are over all dims but `dim`, in row-major order. What has no elements is as it was.
    """
    if not gradient.dim() or not gradient.numel():
        return gradient
    moved = gradient.movedim(dim, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total = torch.zeros(rows.shape[1], device=gradient.device)
    at_once = max(1, AT_ONCE // rows.shape[1])
    for part, into in zip(torch.split(rows, at_once), torch.split(result, at_once), strict=True):
        sums = part.float().cumsum(0).add_(total)
        total = sums[-1].clone()
        up = torch.randint(0, 2, part.shape, generator=draw, dtype=torch.int8, device=part.device)
        into.copy_(sums.abs_().mul_(up.mul_(2).sub_(1)).mul_(unit).add_(part))
    return result.view(moved.shape).movedim(-1, dim)
