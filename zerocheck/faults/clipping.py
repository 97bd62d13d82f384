"""Faults in the norm of the gradient and in clipping."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..adapters.ddp.adapter import Ddp
from ..case.schema import Case
from ..contract import Built
from .parts import ClipsInParts, WithOptimizer


class ReplicatedCountedWTimes(Ddp):
    """The norm of replicated gradients is summed over ranks (PT #88621).

    Flagged: norm x sqrt(W).
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        group = mesh.get_group()

        def clip(max_norm: float, norm_type: float) -> torch.Tensor:
            parameters = [p for p in built.model.parameters() if p.grad is not None]
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
            if norm_type == 2.0:
                square = norm.double().square()
                dist.all_reduce(square, group=group)
                norm = square.sqrt().float()
            clip_grads_with_norm_(parameters, max_norm, norm)
            return norm

        return replace(built, clip=clip)


class _ExtraReduce(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        return self.summed(super().total(p))


class NormExtraReduce(WithOptimizer):
    """The total norm is summed over ranks once more (DS PR#551). Flagged: norm x sqrt(W)."""

    kind = _ExtraReduce


class _LocalNorm(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        return self.local(p)


class LocalNorm(WithOptimizer):
    """Each rank clips by the norm of its own shard (RLinf PR#1542). Flagged: local norm."""

    kind = _LocalNorm


class _SumOfLocal(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        norm = self.local(p)
        dist.all_reduce(norm, group=self.group)
        return norm


class SumOfLocalNorms(WithOptimizer):
    """The norms of the shards are added up, not their squares. Flagged: sum of local norms."""

    kind = _SumOfLocal


class _MeanOfLocal(_SumOfLocal):
    def total(self, p: float) -> torch.Tensor:
        return super().total(p) / self.group.size()


class MeanOfLocalNorms(WithOptimizer):
    """The norms of the shards are averaged, as a logger averages. Flagged: mean of local norms."""

    kind = _MeanOfLocal


class _LargestLocal(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        norm = self.local(p)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.group)
        return norm


class LargestLocalNorm(WithOptimizer):
    """The largest norm of a shard counts, which is right for the infinity norm alone.

    Flagged: largest local norm.
    """

    kind = _LargestLocal


class _LogsLocal(ClipsInParts):
    def clip(self, max_norm: float, norm_type: float) -> float:
        local = float(self.local(norm_type))
        super().clip(max_norm, norm_type)
        return local


class LoggedNormOnly(WithOptimizer):
    """The norm of the own shard is reported, the total one clips (miles PR#35).

    Flagged: local norm, mild: parameters are right.
    """

    kind = _LogsLocal


class _Amplifies(ClipsInParts):
    def factor(self, max_norm: float, norm: torch.Tensor) -> torch.Tensor:
        return torch.clamp(max_norm / (norm + 1e-6), min=1.0)


class ClipAmplifies(WithOptimizer):
    """max for min in the coefficient (DS PR#5150). Flagged: clip, coefficient above 1."""

    kind = _Amplifies


class _Always2(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        return super().total(2.0)


class NormWrongP(WithOptimizer):
    """The 2-norm, whichever is asked for (CA #4795). Flagged: another norm."""

    kind = _Always2


class _NeverScales(ClipsInParts):
    def scale(self, factor: torch.Tensor) -> None:
        pass


class Unclipped(WithOptimizer):
    """Clipping depends on a flag that is not set; the norm is right (DS PR#3166).

    Flagged: not clipped.
    """

    kind = _NeverScales


class _Rank0(ClipsInParts):
    def scale(self, factor: torch.Tensor) -> None:
        if self.group.rank() == 0:
            super().scale(factor)


class Rank0Clips(WithOptimizer):
    """Only rank 0 clips (DS #1801). Flagged: not clipped, on the other ranks."""

    kind = _Rank0


class _Nothing(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        nothing = torch.zeros(1, device=self.device)
        gradients = [getattr(one, "main_grad", nothing) for one in self.owned]
        whole = torch.cat([nothing, *gradients])
        norm: torch.Tensor = torch.linalg.vector_norm(whole, p, dtype=torch.float64)
        return norm


class NormOfNothing(WithOptimizer):
    """The norm is read from an attribute that does not exist (MG a82fa72d52).

    Flagged: norm of nothing.
    """

    kind = _Nothing


class _WithoutHead(ClipsInParts):
    def local(self, p: float) -> torch.Tensor:
        every = self.owned
        self.owned = [one for one in every if not one.piece.name.startswith("head.")]
        try:
            return super().local(p)
        finally:
            self.owned = every


class NormWithoutHead(WithOptimizer):
    """The norm leaves out one module, which is clipped all the same.

    DeepSpeed does so with parameters that a step does not use and an offloaded optimizer.
    Flagged: norm without some parameters.
    """

    kind = _WithoutHead


class _Stale(ClipsInParts):
    cached: torch.Tensor | None = None

    def total(self, p: float) -> torch.Tensor:
        if self.cached is None:
            self.cached = super().total(p)
        return self.cached


class StaleNorm(WithOptimizer):
    """The norm of the first step is kept for all (CA #5002). Flagged: norm of another step."""

    kind = _Stale


class _ClippedTwice(ClipsInParts):
    def scale(self, factor: torch.Tensor) -> None:
        super().scale(factor)
        super().scale(factor)


class ClippedTwice(WithOptimizer):
    """Clipping runs twice with one coefficient. Flagged: clipped twice."""

    kind = _ClippedTwice


class _InHalf(ClipsInParts):
    def local(self, p: float) -> torch.Tensor:
        return super().local(p).half().double()


class NormInHalf(WithOptimizer):
    """The norm is computed in half precision (FS #263). Flagged: clip."""

    kind = _InHalf


class _ReportsTotal(ClipsInParts):
    def clip(self, max_norm: float, norm_type: float) -> float:
        total = float(self.total(norm_type))
        self.scale(self.factor(max_norm, self.local(norm_type).float()))
        return total


class ClippedByLocalNorm(WithOptimizer):
    """The total norm is reported, and the own shard's clips (RLinf PR#1542).

    Flagged: clipped by the local norm.
    """

    kind = _ReportsTotal
