"""Faults that read padding, and with parameters of unusual shape: 0-d, empty, transposed.

Padding shows because unwritten memory is NaN during a case.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..errors import Unsupported
from .fault import fault
from .parts import ClippingInParts, Plantable, frozen


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


@fault(bugs.UNINITIALISED_MEMORY, source="DS PR#8158")
class AlignedWalkedUnaligned(Plantable, Zero2):
    """The gradient buffer is sized with padding and walked without it."""

    def plant(self) -> None:
        for gradient in self.gradients:
            gradient.__class__ = _Walked


@fault(bugs.UNINITIALISED_MEMORY, obligation="clip", source="DS PR#3832, #8158", features=("clip",))
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


@fault(
    bugs.GRADIENT_MISSING, source="seen in review", features=("parameter-0d",), without=("frozen",)
)
class ScalarsOutside(Zero2):
    """0-d parameters are in no bucket, since they have no dim to shard."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        left = [p for p in model.parameters() if p.dim() == 0 and p.requires_grad]
        if len(left) == sum(p.requires_grad for p in model.parameters()):
            raise Unsupported("nothing is left in the buckets")
        with frozen(left):
            super().__init__(model, case, mesh)


@fault(
    bugs.INITIAL_STATE, source="bitsandbytes PR#1187", features=("transposed",), without=("frozen",)
)
class TransposedAsStored(Zero1):
    """Parameters are flattened in the order of their memory, but read row by row."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        stored = {
            parameter: parameter.detach().t().reshape(-1).clone()
            for parameter in model.parameters()
            if not parameter.is_contiguous() and parameter.requires_grad
        }
        super().__init__(model, case, mesh)
        for parameter, values in stored.items():
            parameter.data.view(-1).copy_(values)


@fault(bugs.EMPTY_PARAMETER_LEFT_OUT, source="DS #8279", features=("parameter-empty",))
class EmptyNotOwned(Plantable, Zero3):
    """An empty parameter is owned by no rank, and missing in the saved state."""

    def plant(self) -> None:
        for flat in self.flats:
            flat.pieces = [piece for piece in flat.pieces if piece.start < piece.stop]
