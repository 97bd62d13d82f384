"""Faults in the norm of the gradient and in clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...adapters.textbook.sharded_optimizer import OwnedPiece
from ..fault import fault
from ..parts import ClipsInParts


@fault("clip", source="torchrec PR#3199", features=("clip-inf",))
class InfinityNormOfOne(ClipsInParts):
    """The infinity norm is raised to the power 1 / p too, which is 0: the norm is always 1."""

    def total(self, p: float) -> Tensor:
        norm = super().total(p)
        return norm if p == 2.0 else norm ** (1.0 / p)


@fault(
    "clip", source="MG PR#7227, PR#7228", features=("tied", "clip-tight"),
    without=("clip-inf", "frozen"),
)  # fmt: skip
class TiedNormTwice(ClipsInParts):
    """A tied weight counts twice in the norm, once for each of its names."""

    def counted(self) -> Sequence[OwnedPiece]:
        every = super().counted()
        tied = self.case.model.tied
        return [*every, *(one for one in every if tied and one.piece.name == "stem.weight")]


@fault(
    "clip", source="MG PR#5916, PR#6470", features=("block-experts", "clip-tight"),
    without=("clip-inf", "frozen"), world=3,
)  # fmt: skip
class ExpertsOfRank0InNorm(ClipsInParts):
    """Experts are taken for replicated, so the norm has only the part of them that rank 0 owns."""

    def counted(self) -> Sequence[OwnedPiece]:
        every = super().counted()
        first = self.group.rank() == 0
        return [one for one in every if first or ".experts.mlps." not in one.piece.name]


@fault("clip", source="MG abf10f8590", features=("clip-tight", "groups"))
class NormOfEachGroup(ClipsInParts):
    """Each parameter group is clipped by its own norm, and the total norm is reported."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        every, total = self.optimizer.owned, 0.0
        for group in self.optimizer.optimizer.param_groups:
            mine = {id(parameter) for parameter in group["params"]}
            self.optimizer.owned = [one for one in every if id(one.parameter) in mine]
            norm = super().clip(max_norm, norm_type)
            total = math.hypot(total, norm) if norm_type == 2.0 else max(total, norm)
        self.optimizer.owned = every
        return total
