"""Faults in Muon's update: Newton-Schulz of other matrices, other factors on the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import causes as bugs
from ..adapters.fsdp2.gathered_muon import (
    Fsdp2Muon,
    GatheredMuon,
    local,
    newton_schulz,
    shape_factor,
)
from .fault import fault

Options = Mapping[str, Any]


class _OnTheShard(GatheredMuon):
    def orthogonalized(self, direction: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return newton_schulz(local(direction))

    def rows_of(self, matrix: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return matrix


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_BY_SHARD,
    source="Megatron-LM #5961", features=("muon",),
)  # fmt: skip
class NewtonSchulzOnTheShard(Fsdp2Muon):
    """Each rank orthogonalizes its rows of a matrix; the learning rate is that of the matrix."""

    muon = _OnTheShard


class _ShardAlone(_OnTheShard):
    def rate(self, p: torch.Tensor, group: Options) -> float:
        rows = local(p)
        if not rows.numel():
            return 0.0
        return float(group["lr"] * shape_factor(rows.shape, group["adjust_lr_fn"]))


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_BY_SHARD,
    source="Moonlight #27", features=("muon",),
)  # fmt: skip
class MuonOfLocalTensors(Fsdp2Muon):
    """Muon is given the local tensors, and sees matrices with fewer rows."""

    muon = _ShardAlone


class _ScaleOfRows(GatheredMuon):
    def rate(self, p: torch.Tensor, group: Options) -> float:
        return _ShardAlone.rate(self, p, group)  # type: ignore[arg-type]


@fault(
    "fsdp2-muon", "update", bugs.SCALE_OF_THE_SHARD, source="dion #18", features=("muon",),
)  # fmt: skip
class ScaleFromTheShard(Fsdp2Muon):
    """The whole matrix is orthogonalized, and the learning rate follows the shape of the shard."""

    muon = _ScaleOfRows


class _Turned(GatheredMuon):
    def rate(self, p: torch.Tensor, group: Options) -> float:
        return float(group["lr"] * shape_factor((p.shape[1], p.shape[0]), group["adjust_lr_fn"]))


@fault(
    "fsdp2-muon", "update", bugs.SCALE_OF_THE_TRANSPOSED_MATRIX, source="seen often",
    features=("muon",), without=("muon-rms",),
)  # fmt: skip
class ScaleOfColumns(Fsdp2Muon):
    """The learning rate is adjusted by columns over rows, as of a weight stored transposed."""

    muon = _Turned


class _OtherRule(GatheredMuon):
    def rate(self, p: torch.Tensor, group: Options) -> float:
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        return float(
            group["lr"] * shape_factor(p.shape, "original" if matched else "match_rms_adamw")
        )


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_ADJUSTMENT, source="VeOmni #973", features=("muon",),
)  # fmt: skip
class ScaleOfAnotherConvention(Fsdp2Muon):
    """The learning rate follows the shape by the other one of the two conventions."""

    muon = _OtherRule


class _Unadjusted(GatheredMuon):
    def rate(self, p: torch.Tensor, group: Options) -> float:
        return float(group["lr"])


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_ADJUSTMENT, source="seen often", features=("muon",),
)  # fmt: skip
class ScaleLeftOut(Fsdp2Muon):
    """The learning rate does not follow the shape."""

    muon = _Unadjusted


class _Itself(GatheredMuon):
    def orthogonalized(self, direction: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return self.gathered(direction)


@fault(
    "fsdp2-muon", "update", bugs.NOT_ORTHOGONALIZED, source="seen often", features=("muon",),
)  # fmt: skip
class NewtonSchulzSkipped(Fsdp2Muon):
    """The matrix moves along its momentum."""

    muon = _Itself


class _Fewer(GatheredMuon):
    def orthogonalized(self, direction: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return newton_schulz(self.gathered(direction), steps=3)


@fault(
    "fsdp2-muon", "update", bugs.ANOTHER_NUMBER_OF_ITERATIONS, source="seen often",
    features=("muon",),
)  # fmt: skip
class FewerIterations(Fsdp2Muon):
    """The iteration ends after three steps."""

    muon = _Fewer


class _Thirds(GatheredMuon):
    def orthogonalized(self, direction: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        whole = self.gathered(direction)
        if whole.shape[0] % 3:
            return newton_schulz(whole)
        return torch.cat([newton_schulz(one) for one in whole.chunk(3)])


@fault(
    "fsdp2-muon", "update", bugs.ORTHOGONALIZED_IN_PARTS, source="Megatron-LM #5533",
    features=("muon", "block-attention"),
)  # fmt: skip
class FusedMatrixSplit(Fsdp2Muon):
    """A fused matrix of query, key and value is orthogonalized in thirds, and others with it."""

    muon = _Thirds
