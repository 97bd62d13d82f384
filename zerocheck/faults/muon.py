"""Faults in Muon's update: Newton-Schulz of other matrices, other factors on the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import causes as bugs
from ..adapters.fsdp2.gathered_muon import (
    Fsdp2Muon,
    GatheredMuon,
    Options,
    local,
    newton_schulz,
    shape_factor,
)
from ..case.schema import Case
from .fault import fault
from .parts import lend


class MuonInParts(Fsdp2Muon):
    """FSDP2 with the methods of Muon as its own, which a fault can replace."""

    muon: GatheredMuon

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        self.muon, adamw = super().make_optimizer(model, case)
        lend(self, self.muon, "average", "direction", "orthogonalized", "rows_of", "rate")
        lend(self, self.muon, "decay", update="update_matrix")
        return [self.muon, adamw]

    def update_matrix(self, p: Tensor, group: Options) -> None:
        """Update one matrix."""
        GatheredMuon.update(self.muon, p, group)

    def average(self, buffer: Tensor, gradient: Tensor, p: Tensor, group: Options) -> None:
        """Take the gradient into the buffer, shard by shard."""
        GatheredMuon.average(self.muon, buffer, gradient, p, group)

    def direction(self, buffer: Tensor, gradient: Tensor, group: Options) -> Tensor:
        """Return the matrix to orthogonalize, sharded as the buffer is."""
        return GatheredMuon.direction(self.muon, buffer, gradient, group)

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        """Return the whole orthogonalized matrix, on every rank."""
        return GatheredMuon.orthogonalized(self.muon, direction, p)

    def rows_of(self, matrix: Tensor, p: Tensor) -> Tensor:
        """Return this rank's part of a whole matrix."""
        return GatheredMuon.rows_of(self.muon, matrix, p)

    def rate(self, p: Tensor, group: Options) -> float:
        """Return the learning rate, by the shape of the whole matrix."""
        return GatheredMuon.rate(self.muon, p, group)

    def decay(self, p: Tensor, group: Options) -> float:
        """Return what weight decay takes off a parameter, relative to it."""
        return GatheredMuon.decay(self.muon, p, group)


def rate_of_shard(p: Tensor, group: Options) -> float:
    """Return the learning rate by the shape of the rank's rows of a matrix."""
    rows = local(p)
    if not rows.numel():
        return 0.0
    return float(group["lr"] * shape_factor(rows.shape, group["adjust_lr_fn"]))


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_BY_SHARD,
    source="Megatron-LM #5961", features=("muon",),
)  # fmt: skip
class NewtonSchulzOnTheShard(MuonInParts):
    """Each rank orthogonalizes its rows of a matrix; the learning rate is that of the matrix."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return newton_schulz(local(direction))

    def rows_of(self, matrix: Tensor, p: Tensor) -> Tensor:
        return matrix


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_BY_SHARD,
    source="Moonlight #27", features=("muon",),
)  # fmt: skip
class MuonOfLocalTensors(NewtonSchulzOnTheShard):
    """Muon is given the local tensors, and sees matrices with fewer rows."""

    def rate(self, p: Tensor, group: Options) -> float:
        return rate_of_shard(p, group)


@fault(
    "fsdp2-muon", "update", bugs.SCALE_OF_THE_SHARD, source="dion #18", features=("muon",),
)  # fmt: skip
class ScaleFromTheShard(MuonInParts):
    """The whole matrix is orthogonalized, and the learning rate follows the shape of the shard."""

    def rate(self, p: Tensor, group: Options) -> float:
        return rate_of_shard(p, group)


@fault(
    "fsdp2-muon", "update", bugs.SCALE_OF_THE_TRANSPOSED_MATRIX, source="seen often",
    features=("muon",), without=("muon-rms",),
)  # fmt: skip
class ScaleOfColumns(MuonInParts):
    """The learning rate is adjusted by columns over rows, as of a weight stored transposed."""

    def rate(self, p: Tensor, group: Options) -> float:
        return float(group["lr"] * shape_factor((p.shape[1], p.shape[0]), group["adjust_lr_fn"]))


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_ADJUSTMENT, source="VeOmni #973", features=("muon",),
)  # fmt: skip
class ScaleOfAnotherConvention(MuonInParts):
    """The learning rate follows the shape by the other one of the two conventions."""

    def rate(self, p: Tensor, group: Options) -> float:
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        return float(
            group["lr"] * shape_factor(p.shape, "original" if matched else "match_rms_adamw")
        )


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_ADJUSTMENT, source="seen often", features=("muon",),
)  # fmt: skip
class ScaleLeftOut(MuonInParts):
    """The learning rate does not follow the shape."""

    def rate(self, p: Tensor, group: Options) -> float:
        return float(group["lr"])


@fault(
    "fsdp2-muon", "update", bugs.NOT_ORTHOGONALIZED, source="seen often", features=("muon",),
)  # fmt: skip
class NewtonSchulzSkipped(MuonInParts):
    """The matrix moves along its momentum."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return self.muon.gathered(direction)


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_NUMBER_OF_ITERATIONS, source="seen often",
    features=("muon",),
)  # fmt: skip
class FewerIterations(MuonInParts):
    """The iteration ends after three steps."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return newton_schulz(self.muon.gathered(direction), steps=3)


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_IN_PARTS, source="Megatron-LM #5533",
    features=("muon", "block-attention"),
)  # fmt: skip
class FusedMatrixSplit(MuonInParts):
    """A fused matrix of query, key and value is orthogonalized in thirds, and others with it."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        whole = self.muon.gathered(direction)
        if whole.shape[0] % 3:
            return newton_schulz(whole)
        return torch.cat([newton_schulz(one) for one in whole.chunk(3)])
