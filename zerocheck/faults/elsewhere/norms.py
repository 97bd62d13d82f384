"""Faults in the norm of the gradient and in clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...adapters.textbook.sharded_optimizer import OwnedPiece
from ...case.schema import Case
from ..fault import fault
from ..parts import ClipsInParts, WithOptimizer


class _RootOfInfinity(ClipsInParts):
    def total(self, p: float) -> torch.Tensor:
        norm = super().total(p)
        return norm if p == 2.0 else norm ** (1.0 / p)


@fault("zero1", "clip", source="torchrec PR#3199", features=("clip-inf",))
class InfinityNormOfOne(WithOptimizer):
    """The infinity norm is raised to the power 1 / p too, which is 0: the norm is always 1."""

    kind = _RootOfInfinity


class _TiedTwice(ClipsInParts):
    def __init__(
        self, case: Case, owned: Sequence[OwnedPiece], group: dist.ProcessGroup, device: str = "cpu"
    ) -> None:
        super().__init__(case, owned, group, device)
        self.tied = case.model.tied

    def local(self, p: float) -> torch.Tensor:
        every = self.owned
        copies = [one for one in every if self.tied and one.piece.name == "stem.weight"]
        self.owned = [*every, *copies]
        try:
            return super().local(p)
        finally:
            self.owned = every


@fault(
    "zero1", "clip", source="MG PR#7227, PR#7228", features=("tied", "clip-tight"),
    without=("clip-inf", "frozen"),
)  # fmt: skip
class TiedNormTwice(WithOptimizer):
    """A tied weight counts twice in the norm, once for each of its names."""

    kind = _TiedTwice


class _ExpertsOfRank0(ClipsInParts):
    def local(self, p: float) -> torch.Tensor:
        every = self.owned
        if self.group.rank() > 0:
            self.owned = [one for one in every if ".experts.mlps." not in one.piece.name]
        try:
            return super().local(p)
        finally:
            self.owned = every


@fault(
    "zero1", "clip", source="MG PR#5916, PR#6470", features=("block-experts", "clip-tight"),
    without=("clip-inf", "frozen"), world=3,
)  # fmt: skip
class ExpertsOfRank0InNorm(WithOptimizer):
    """Experts are taken for replicated, so the norm has only the part of them that rank 0 owns."""

    kind = _ExpertsOfRank0


class _ByGroup(ClipsInParts):
    def clip(self, max_norm: float, norm_type: float) -> float:
        every, total = self.owned, 0.0
        for group in self.optimizer.param_groups:
            mine = {id(parameter) for parameter in group["params"]}
            self.owned = [one for one in every if id(one.parameter) in mine]
            norm = super().clip(max_norm, norm_type)
            total = math.hypot(total, norm) if norm_type == 2.0 else max(total, norm)
        self.owned = every
        return total


@fault("zero1", "clip", source="MG abf10f8590", features=("clip-tight", "groups"))
class NormOfEachGroup(WithOptimizer):
    """Each parameter group is clipped by its own norm, and the total norm is reported."""

    kind = _ByGroup
