"""Faults in Muon: update, momentum, decay, checkpoints, and what is left to AdamW."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
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
from ..adapters.textbook.bucket import publish
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case, Optimizer
from ..contract import groups
from .fault import fault
from .parts import CheckpointInParts, lend, method_of

MUON = {"optimizer": {"kind": "muon"}}
NESTEROV = {"optimizer": {"kind": "muon", "momentum": 0.95, "nesterov": True}}
PLAIN = {"optimizer": {"kind": "muon", "momentum": 0.95, "nesterov": False}}

UNSCALED = {**MUON, "training": {"loss_scale": None}}
"""A GradScaler would unscale gradients twice, or not, which is another consequence."""


class MuonInParts(Fsdp2Muon):
    """FSDP2 with the methods of Muon as its own, which a fault can replace."""

    muon: GatheredMuon

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        self.muon, adamw = super().make_optimizer(model, case)
        lend(self, self.muon, "average", "direction", "orthogonalized", "rows_of", "rate")
        lend(self, self.muon, "decay", update="update_matrix")
        return [self.muon, adamw]

    update_matrix = method_of("muon", GatheredMuon.update)
    average = method_of("muon", GatheredMuon.average)
    direction = method_of("muon", GatheredMuon.direction)
    orthogonalized = method_of("muon", GatheredMuon.orthogonalized)
    rows_of = method_of("muon", GatheredMuon.rows_of)
    rate = method_of("muon", GatheredMuon.rate)
    decay = method_of("muon", GatheredMuon.decay)


def rate_of_shard(p: Tensor, group: Options) -> float:
    """Return the learning rate by the shape of the rank's rows of a matrix."""
    rows = local(p)
    if not rows.numel():
        return 0.0
    return float(group["lr"] * shape_factor(rows.shape, group["adjust_lr_fn"]))


@fault(bugs.ORTHOGONALIZED_BY_SHARD, source="Megatron-LM #5961", features=("muon",))
class NewtonSchulzOnTheShard(MuonInParts):
    """Each rank orthogonalizes its rows of a matrix; the learning rate is that of the matrix."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return newton_schulz(local(direction))

    def rows_of(self, matrix: Tensor, p: Tensor) -> Tensor:
        return matrix


@fault(bugs.ORTHOGONALIZED_BY_SHARD, source="Moonlight #27", features=("muon",))
class MuonOfLocalTensors(NewtonSchulzOnTheShard):
    """Muon is given the local tensors, and sees matrices with fewer rows."""

    def rate(self, p: Tensor, group: Options) -> float:
        return rate_of_shard(p, group)


@fault(bugs.SCALE_OF_THE_SHARD, source="dion #18", features=("muon",))
class ScaleFromTheShard(MuonInParts):
    """The whole matrix is orthogonalized, and the learning rate follows the shape of the shard."""

    def rate(self, p: Tensor, group: Options) -> float:
        return rate_of_shard(p, group)


@fault(
    bugs.SCALE_OF_THE_TRANSPOSED_MATRIX, source="seen often", features=("muon",),
    without=("muon-rms",),
)  # fmt: skip
class ScaleOfColumns(MuonInParts):
    """The learning rate is adjusted by columns over rows, as of a weight stored transposed."""

    def rate(self, p: Tensor, group: Options) -> float:
        return float(group["lr"] * shape_factor((p.shape[1], p.shape[0]), group["adjust_lr_fn"]))


@fault(bugs.ANOTHER_ADJUSTMENT, source="VeOmni #973", features=("muon",))
class ScaleOfAnotherConvention(MuonInParts):
    """The learning rate follows the shape by the other one of the two conventions."""

    def rate(self, p: Tensor, group: Options) -> float:
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        return float(
            group["lr"] * shape_factor(p.shape, "original" if matched else "match_rms_adamw")
        )


@fault(bugs.ANOTHER_ADJUSTMENT, source="seen often", features=("muon",))
class ScaleLeftOut(MuonInParts):
    """The learning rate does not follow the shape."""

    def rate(self, p: Tensor, group: Options) -> float:
        return float(group["lr"])


@fault(bugs.NOT_ORTHOGONALIZED, source="seen often", features=("muon",))
class NewtonSchulzSkipped(MuonInParts):
    """The matrix moves along its momentum."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return self.muon.gathered(direction)


@fault(bugs.ANOTHER_NUMBER_OF_ITERATIONS, source="seen often", features=("muon",))
class FewerIterations(MuonInParts):
    """The iteration ends after three steps."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        return newton_schulz(self.muon.gathered(direction), steps=3)


@fault(
    bugs.ORTHOGONALIZED_IN_PARTS, source="Megatron-LM #5533", features=("muon", "block-attention")
)
class FusedMatrixSplit(MuonInParts):
    """A fused matrix of query, key and value is orthogonalized in thirds, and others with it."""

    def orthogonalized(self, direction: Tensor, p: Tensor) -> Tensor:
        whole = self.muon.gathered(direction)
        if whole.shape[0] % 3:
            return newton_schulz(whole)
        return torch.cat([newton_schulz(one) for one in whole.chunk(3)])


@fault(
    bugs.MOMENTS_OF_THE_PREVIOUS_STEP, source="none known",
    features=("muon", "muon-plain", "mid-training"),
)  # fmt: skip
class MomentumGatheredEarly(MuonInParts):
    """The momentum is gathered before the gradient of this step is in it."""

    fixed = PLAIN

    def update_matrix(self, p: Tensor, group: Options) -> None:
        buffer = self.muon.state[p].get("momentum_buffer")
        self._before = None if buffer is None or not bool(buffer.any()) else buffer.clone()
        super().update_matrix(p, group)

    def direction(self, buffer: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return buffer if self._before is None else self._before


@fault(bugs.GRADIENT_NOT_DAMPENED, source="seen often", features=("muon",))
class MomentumOfSgd(MuonInParts):
    """The momentum is a sum, as that of SGD, and not an average."""

    def average(self, buffer: Tensor, gradient: Tensor, p: Tensor, group: Options) -> None:
        local(buffer).mul_(group["momentum"]).add_(local(gradient))


@fault(bugs.NESTEROV_LEFT_OUT, source="seen often", features=("muon",), without=("muon-plain",))
class MuonWithoutNesterov(MuonInParts):
    """The direction is the buffer, though the form is to be Nesterov's."""

    fixed = NESTEROV

    def direction(self, buffer: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return buffer


@fault(bugs.NESTEROV_ADDED, source="none known", features=("muon", "muon-plain"))
class MuonWithNesterov(MuonInParts):
    """The direction has Nesterov's form, which nobody asked for."""

    fixed = PLAIN

    def direction(self, buffer: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient.lerp(buffer, group["momentum"])


@fault(bugs.MOMENTUM_LEFT_OUT, source="none known", features=("muon", "several-steps"))
class MuonOfTheGradient(MuonInParts):
    """The gradient is orthogonalized, and the momentum kept for nothing."""

    def direction(self, buffer: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient


@fault(bugs.WEIGHT_DECAY_BY_THE_ADJUSTED_RATE, source="seen often", features=("muon", "lr-large"))
class MuonDecayByTheAdjustedRate(MuonInParts):
    """Weight decay is multiplied by the learning rate that follows the shape."""

    def decay(self, p: Tensor, group: Options) -> float:
        return self.rate(p, group) * float(group["weight_decay"])


@fault(bugs.WEIGHT_DECAY_TWICE, source="seen often", features=("muon", "lr-large"))
class MuonDecayTwice(MuonInParts):
    """Weight decay is applied twice."""

    def decay(self, p: Tensor, group: Options) -> float:
        once = super().decay(p, group)
        return 1 - (1 - once) * (1 - once)


@fault(bugs.WEIGHT_DECAY_MISSING, source="seen often", features=("muon", "lr-large"))
class MuonDecayMissing(MuonInParts):
    """Muon has no weight decay, as in its first publication."""

    def decay(self, p: Tensor, group: Options) -> float:
        return 0.0


@fault(bugs.L2_INSTEAD_OF_DECOUPLED, source="none known", features=("muon", "lr-large"))
class MuonDecayCoupled(MuonDecayMissing):
    """Weight decay is in the gradient, and is orthogonalized with it."""

    def average(self, buffer: Tensor, gradient: Tensor, p: Tensor, group: Options) -> None:
        decayed = local(gradient).add(local(p), alpha=group["weight_decay"])
        local(buffer).lerp_(decayed, 1 - group["momentum"])


@fault(bugs.MOMENTUM_NORMALIZED, source="pytorch PR#194664", features=("muon",))
class MomentumNormalized(MuonInParts):
    """Newton-Schulz divides the momentum itself by its norm."""

    def update_matrix(self, p: Tensor, group: Options) -> None:
        super().update_matrix(p, group)
        buffer = self.muon.state[p]["momentum_buffer"]
        norm = self.muon.gathered(buffer).norm().clamp(min=1e-7)
        local(buffer).div_(norm)


@fault(bugs.ROUNDED_TO_BF16, source="seen often", features=("muon",))
class MuonMomentumInBf16(MuonInParts):
    """The momentum is kept in bf16."""

    def average(self, buffer: Tensor, gradient: Tensor, p: Tensor, group: Options) -> None:
        super().average(buffer, gradient, p, group)
        local(buffer).copy_(local(buffer).bfloat16())


@fault(bugs.MOMENTS_RESET, source="Megatron-LM #6920", features=("muon", "several-steps"))
class MuonMomentumForgotten(MuonInParts):
    """The momentum is lost in each step."""

    def update_matrix(self, p: Tensor, group: Options) -> None:
        self.muon.state[p].clear()
        super().update_matrix(p, group)


@fault(
    bugs.UPDATED_BY_ANOTHER_OPTIMIZER, source="lerobot #4658", features=("muon",),
    without=("mid-training", "loss-scale"),
)  # fmt: skip
class MatricesLeftToAdamw(Fsdp2Muon):
    """Every parameter is left to AdamW."""

    fixed = UNSCALED

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        return _adamw_of_all(model, case)


def _adamw_of_all(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Make AdamW over every parameter, with the groups of the case."""
    options = Optimizer(groups=case.optimizer.groups, kernel=case.optimizer.kernel)
    return torch.optim.AdamW(groups(model, replace(case, optimizer=options)))


@fault(
    bugs.UPDATED_BY_ANOTHER_OPTIMIZER, source="none known", features=("muon",),
    without=("mid-training", "loss-scale"),
)  # fmt: skip
class MatricesInBoth(Fsdp2Muon):
    """AdamW updates the matrices, and Muon does so too."""

    fixed = UNSCALED

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        adamw = _adamw_of_all(model, case)
        return [GatheredMuon(groups(model, case, "muon")), adamw]


@fault(bugs.NEVER_UPDATED, source="lerobot #4658", features=("muon",), without=("loss-scale",))
class FallbackLeftOut(Fsdp2Muon):
    """Nobody updates what is no matrix."""

    fixed = UNSCALED

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        return GatheredMuon(groups(model, case, "muon"))


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="none known", features=("muon",))
class MatricesReachRank0Alone(Zero1):
    """Each owner updates its matrices, and they are gathered on rank 0, not on all ranks."""

    fixed = MUON

    def _publish(self) -> None:
        for bucket in self.buckets:
            if bucket.whole:
                bucket.refresh()
                size, first = dist.get_world_size(bucket.group), dist.get_rank(bucket.group) == 0
                parts = [part.clone() for part in bucket.full.chunk(size)] if first else None
                dist.gather(bucket.local, parts, group=bucket.group, group_dst=0)
                if parts is not None:
                    bucket.full.copy_(torch.cat(parts))
            else:
                publish([bucket])


@fault(bugs.MOMENTS_LOST, source="Megatron-LM #6920", features=("muon",))
class MuonMomentumNotLoaded(CheckpointInParts, Zero3):
    """A resume starts with a momentum of zeros, and says nothing."""

    fixed = MUON

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"].zero_()


@fault(bugs.TENSORS_EXCHANGED, source="Megatron-LM #6920", features=("muon", "resume-more"))
class MomentumByOwner(CheckpointInParts, Zero1):
    """On another number of ranks an owner takes the momenta of the matrices that it owned before.

    Where two matrices of one shape change owners, each gets the momentum of the other.
    """

    fixed = MUON

    def end_load(self) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for one in self.optimizer.owned:
            state = self.optimizer.optimizer.state.get(one.parameter, {})
            if "momentum_buffer" in state:
                by_shape.setdefault(one.piece.shape, []).append(state["momentum_buffer"])
        for alike in by_shape.values():
            copies = [one.clone() for one in alike]
            for momentum, other in zip(alike, [*copies[1:], copies[0]], strict=True):
                momentum.copy_(other)
