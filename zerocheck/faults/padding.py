"""Faults that read padding. They show because unwritten memory is NaN during a case."""

from __future__ import annotations

import torch

from .. import causes as bugs
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from .fault import fault
from .parts import ClippingInParts, Plantable


class _Unwritten(GradientBucket):
    """Gradient bucket that writes only elements that belong to a parameter."""

    def _buffer(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.empty_like(self.bucket.full, dtype=torch.float32)
            for view in self.bucket.views(self._whole):
                view.zero_()
        return self._whole


class _Walked(GradientBucket):
    """Gradient bucket that lays gradients end to end, without the padding between them."""

    def collect(self, number: int) -> None:
        partition = self.bucket.partition
        walked = sum(parameter.numel() for parameter in self.bucket.parameters[:number])
        aligned, partition.offsets = partition.offsets, list(partition.offsets)
        partition.offsets[number] = walked
        super().collect(number)
        partition.offsets = aligned

    def _buffer(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.empty_like(self.bucket.full, dtype=torch.float32)
        return self._whole


@fault("gradient", bugs.UNINITIALISED_MEMORY, source="DS PR#8158")
class AlignedWalkedUnaligned(Plantable, Zero2):
    """The gradient buffer is sized with padding and walked without it."""

    def plant(self) -> None:
        for gradient in self.gradients:
            gradient.__class__ = _Walked


@fault("clip", bugs.UNINITIALISED_MEMORY, source="DS PR#3832, #8158", features=("clip",))
class PaddingInNorm(ClippingInParts, Zero2):
    """The norm includes unwritten padding of the flat gradient."""

    def plant(self) -> None:
        for gradient in self.gradients:
            gradient.__class__ = _Unwritten

    def local(self, p: float) -> torch.Tensor:
        shards = [gradient.shard for gradient in self.gradients]
        nothing = torch.zeros(1, device=self.optimizer.device)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([*shards, nothing]).double(), p)
        return norm
