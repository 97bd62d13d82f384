"""Faults in the norm of the gradient and in clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.sharded_optimizer import OwnedPiece
from ..case.schema import Case
from ..contract import Built
from .fault import FORWARD, fault
from .parts import ClipsInParts


@fault(bugs.NORM_TIMES_ROOT_W, source="PT #88621", features=("clip",), without=("clip-inf",))
class ReplicatedCountedWTimes(Ddp):
    """The norm of replicated gradients is summed over ranks."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        group = mesh.get_group()

        def clip(max_norm: float, norm_type: float) -> Tensor:
            parameters = [p for p in built.model.parameters() if p.grad is not None]
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
            if norm_type == 2.0:
                square = norm.double().square()
                dist.all_reduce(square, group=group)
                norm = square.sqrt().float()
            clip_grads_with_norm_(parameters, max_norm, norm)
            return norm

        return replace(built, clip=clip)


@fault(bugs.NORM_TIMES_ROOT_W, source="DS PR#551", features=("clip",), without=("clip-inf",))
class NormExtraReduce(ClipsInParts):
    """The total norm is summed over ranks once more."""

    def total(self, p: float) -> Tensor:
        return self.summed(super().total(p))


@fault(bugs.LOCAL_NORM, source="RLinf PR#1542", features=("clip-tight",))
class LocalNorm(ClipsInParts):
    """Each rank clips by the norm of its own shard."""

    def total(self, p: float) -> Tensor:
        return self.local(p)


@fault(bugs.SUM_OF_LOCAL_NORMS, source="seen often", world=3, features=("clip-tight",))
class SumOfLocalNorms(ClipsInParts):
    """The norms of the shards are added up, not their squares."""

    def total(self, p: float) -> Tensor:
        norm = self.local(p)
        dist.all_reduce(norm, group=self.group)
        return norm


@fault(bugs.MEAN_OF_LOCAL_NORMS, source="seen often", world=3, features=("clip-tight",))
class MeanOfLocalNorms(SumOfLocalNorms):
    """The norms of the shards are averaged."""

    def total(self, p: float) -> Tensor:
        return super().total(p) / self.group.size()


@fault(bugs.LARGEST_LOCAL_NORM, source="seen often", world=3, features=("clip-tight",))
class LargestLocalNorm(ClipsInParts):
    """The largest norm of a shard counts, which is right for the infinity norm alone."""

    def total(self, p: float) -> Tensor:
        return self.largest(self.local(p))


@fault(bugs.CLIPPED_BY_THE_LOCAL_NORM, source="RLinf PR#1542", features=("clip-tight",))
class ClippedByLocalNorm(ClipsInParts):
    """The total norm is reported, and the own shard's clips."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        total = float(self.total(norm_type))
        self.scale(self.factor(max_norm, self.local(norm_type).float()))
        return total


@fault(bugs.LOCAL_NORM, source="miles PR#35", features=("clip",), spares=FORWARD, mild=True)
class LoggedNormOnly(ClipsInParts):
    """The norm of the own shard is reported, the total one clips."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        local = float(self.local(norm_type))
        super().clip(max_norm, norm_type)
        return local


@fault(bugs.COEFFICIENT_ABOVE_1, source="DS PR#5150", features=("clip-loose",))
class ClipAmplifies(ClipsInParts):
    """Small gradients are scaled up: max for min."""

    def factor(self, max_norm: float, norm: Tensor) -> Tensor:
        return torch.clamp(max_norm / (norm + 1e-6), min=1.0)


@fault(bugs.ANOTHER_NORM, source="CA #4795", features=("clip-inf", "clip-tight"))
class NormWrongP(ClipsInParts):
    """The 2-norm, whichever is asked for."""

    def total(self, p: float) -> Tensor:
        return super().total(2.0)


@fault(bugs.NOT_CLIPPED, source="DS PR#3166", features=("clip-tight",))
class Unclipped(ClipsInParts):
    """Clipping depends on a flag that is not set; the norm is right."""

    def scale(self, factor: Tensor) -> None:
        pass


@fault(bugs.NOT_CLIPPED, source="DS #1801", features=("clip-tight",))
class Rank0Clips(ClipsInParts):
    """Only rank 0 clips."""

    def scale(self, factor: Tensor) -> None:
        if self.group.rank() == 0:
            super().scale(factor)


@fault(bugs.NORM_OF_NOTHING, source="MG a82fa72d52", features=("clip-tight",))
class NormOfNothing(ClipsInParts):
    """The norm is read from an attribute that does not exist."""

    def total(self, p: float) -> Tensor:
        nothing = torch.zeros(1, device=self.optimizer.device)
        gradients = [getattr(one, "main_grad", nothing) for one in self.optimizer.owned]
        whole = torch.cat([nothing, *gradients])
        norm: Tensor = torch.linalg.vector_norm(whole, p, dtype=torch.float64)
        return norm


@fault(
    bugs.NORM_WITHOUT_SOME_PARAMETERS, source="DeepSpeed, seen here", world=3,
    features=("clip-tight",), without=("tied",),
)  # fmt: skip
class NormWithoutHead(ClipsInParts):
    """The norm leaves out one module, which is clipped all the same.

    DeepSpeed does so with parameters that a step does not use and an offloaded optimizer.
    """

    def counted(self) -> Sequence[OwnedPiece]:
        return [one for one in super().counted() if not one.piece.name.startswith("head.")]


@fault(bugs.NORM_OF_ANOTHER_STEP, source="CA #5002", features=("clip-tight", "several-steps"))
class StaleNorm(ClipsInParts):
    """The norm of the first step is kept for all."""

    cached: Tensor | None = None

    def total(self, p: float) -> Tensor:
        if self.cached is None:
            self.cached = super().total(p)
        return self.cached


@fault(bugs.CLIPPED_TWICE, source="seen often", features=("clip-tight",))
class ClippedTwice(ClipsInParts):
    """Clipping runs twice with one coefficient."""

    def scale(self, factor: Tensor) -> None:
        super().scale(factor)
        super().scale(factor)


@fault(obligation="clip", source="FS #263", features=("clip-tight",))
class NormInHalf(ClipsInParts):
    """The norm is computed in half precision."""

    def local(self, p: float) -> Tensor:
        return super().local(p).half().double()
