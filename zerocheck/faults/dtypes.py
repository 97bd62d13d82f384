"""Faults that only a model with parameters of two dtypes shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import causes as bugs
from ..adapters.textbook.sharded_optimizer import ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..compat import reduce_scatter_single
from ..optimizers import STATES
from .fault import fault
from .parts import ClipsInParts, WithOptimizer


class _ScalesFp32(ClipsInParts):
    def scale(self, factor: torch.Tensor) -> None:
        for one in self.owned:
            if one.gradient.dtype == torch.float32:
                one.gradient.mul_(factor)


@fault(
    "zero1", "clip", bugs.NOT_CLIPPED, source="seen often", features=("mixed-dtypes", "clip-tight")
)
class Bf16Unclipped(WithOptimizer):
    """Gradients are multiplied by the coefficient only where they are fp32.

    As gradients of expert or fp16 groups were left out in DeepSpeed.
    """

    kind = _ScalesFp32


class _LastDtype(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        """Return the norm of the last dtype, which replaces the others instead of being added."""
        norm = torch.zeros((), dtype=torch.float64, device=self.device)
        for dtype in (torch.bfloat16, torch.float32):
            pieces = [one.gradient.double() for one in self.owned if one.gradient.dtype == dtype]
            norm = torch.linalg.vector_norm(torch.cat([norm.new_zeros(1), *pieces]), p)
        if p == 2.0:
            return self.summed(norm)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.group)
        return norm


@fault(
    "zero1", "clip", bugs.NORM_OF_ONE_DTYPE, source="seen often",
    features=("mixed-dtypes", "clip-tight"), without=("clip-inf", "frozen"),
)  # fmt: skip
class NormOfOneDtype(WithOptimizer):
    """The norm is taken by dtype, and the last one overwrites the others."""

    kind = _LastDtype


class _StateInBf16(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for one in self.owned:
            state = self.optimizer.state[one.parameter]
            for role in STATES:
                if role in state:
                    state[role].copy_(state[role].bfloat16())


@fault("zero1", "update", bugs.ROUNDED_TO_BF16, source="PT #104770", features=("mixed-dtypes",))
class StateInBf16(WithOptimizer):
    """All moments are kept in one flat buffer, of the dtype of one of the parameters."""

    kind = _StateInBf16


@fault(
    "zero1", "gradient", bugs.LOCAL_GRADIENT_ONLY, source="seen often", features=("mixed-dtypes",)
)
class OtherBufferUnreduced(Zero1):
    """Gradients are in a buffer per dtype, and only the first buffer's dtype is reduced."""

    def _reduce(self) -> None:
        dtype = self.gradients[0].dtype
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if gradients.dtype == dtype:
                work = reduce_scatter_single(bucket.gradient, gradients, self.group)
                if work is not None:
                    work.wait()
                bucket.gradient.div_(self.world_size)
        self.reduced = True
