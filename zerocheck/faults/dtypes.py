"""Faults that only a model with parameters of two dtypes shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import causes as bugs
from ..adapters.textbook.sharded_optimizer import OwnedPiece
from ..adapters.textbook.zero1 import Zero1
from ..compat import reduce_scatter_single, wait
from .fault import fault
from .parts import ClipsInParts
from .precision import MomentsInBf16


@fault(
    "zero1", "clip", bugs.NOT_CLIPPED, source="seen often", features=("mixed-dtypes", "clip-tight")
)
class Bf16Unclipped(ClipsInParts):
    """Gradients are multiplied by the coefficient only where they are fp32.

    As gradients of expert or fp16 groups were left out in DeepSpeed.
    """

    def scale(self, factor: Tensor) -> None:
        for one in self.optimizer.owned:
            if one.gradient.dtype == torch.float32:
                one.gradient.mul_(factor)


@fault(
    "zero1", "clip", bugs.NORM_OF_ONE_DTYPE, source="seen often",
    features=("mixed-dtypes", "clip-tight"), without=("clip-inf", "frozen"),
)  # fmt: skip
class NormOfOneDtype(ClipsInParts):
    """The norm is taken by dtype, and the last one, fp32, overwrites the others."""

    def counted(self) -> Sequence[OwnedPiece]:
        return [one for one in super().counted() if one.gradient.dtype == torch.float32]


@fault("zero1", "update", bugs.ROUNDED_TO_BF16, source="PT #104770", features=("mixed-dtypes",))
class StateInBf16(MomentsInBf16):
    """All moments are kept in one flat buffer, of the dtype of one of the parameters."""


@fault(
    "zero1", "gradient", bugs.LOCAL_GRADIENT_ONLY, source="seen often", features=("mixed-dtypes",)
)
class OtherBufferUnreduced(Zero1):
    """Gradients are in a buffer per dtype, and only the first buffer's dtype is reduced."""

    def _reduce(self) -> None:
        dtype = self.gradients[0].dtype
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if gradients.dtype == dtype:
                wait(reduce_scatter_single(bucket.gradient, gradients, self.group))
                bucket.gradient.div_(self.world_size)
        self.reduced = True
