"""Faults that read padding. They show because unwritten memory is NaN during a case."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from ..case.schema import Case
from .fault import fault
from .parts import ClipsInParts


class _Walked(GradientBucket):
    """Base that lays gradients end to end, without the padding between them."""

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


@fault("zero2", "gradient", bugs.UNINITIALISED_MEMORY, source="DS PR#8158")
class AlignedWalkedUnaligned(Zero2):
    """The gradient buffer is sized with padding and walked without it."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for gradient in self.gradients:
            gradient.__class__ = _Walked


class _Unwritten(GradientBucket):
    """Base that writes only elements that belong to a parameter."""

    def _buffer(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = torch.empty_like(self.bucket.full, dtype=torch.float32)
            for view in self.bucket.views(self._whole):
                view.zero_()
        return self._whole


class _FlatNorm(ClipsInParts):
    flat: list[torch.Tensor]

    def local(self, p: float) -> torch.Tensor:
        whole = torch.cat([*self.flat, torch.zeros(1, device=self.device)]).double()
        norm: torch.Tensor = torch.linalg.vector_norm(whole, p)
        return norm


@fault("zero2", "clip", bugs.UNINITIALISED_MEMORY, source="DS PR#3832, #8158", features=("clip",))
class PaddingInNorm(Zero2):
    """The norm includes unwritten padding of the flat gradient."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        sharded = self.optimizer
        optimizer = _FlatNorm(case, sharded.owned, sharded.group, sharded.device)
        optimizer.flat = [gradient.shard for gradient in self.gradients]
        self.optimizer = optimizer
        for gradient in self.gradients:
            gradient.__class__ = _Unwritten
