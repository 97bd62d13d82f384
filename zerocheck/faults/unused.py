"""Faults with parameters without a gradient, of unusual shape or frozen, and with padding.

Padding shows because unwritten memory is NaN during a case.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2, reduce_unused
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Built
from ..errors import Unsupported
from .fault import fault
from .parts import ClippingInParts, Plantable, Zero3InParts, frozen


@fault(bugs.NONE_BECAME_ZERO, source="FS #605", features=("unused",))
class NoneBecomesZero(Plantable, Ddp):
    """A gradient that is None becomes zeros, so AdamW moves and decays."""

    def plant(self) -> None:
        self.built.optimizer.zero_grad = self.zero

    def zero(self, set_to_none: bool = True) -> None:
        """Set every gradient to zeros."""
        for parameter in self.built.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


@fault(bugs.GRADIENT_MISSING, source="MG #565")
class OutsideFlatBuffer(Zero1):
    """The head is in no bucket: neither reduced nor updated."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        head = [p for p in model.get_submodule("head").parameters() if p.requires_grad]
        if case.model.tied or len(head) == sum(p.requires_grad for p in model.parameters()):
            raise Unsupported("nothing is left in the buffer")
        with frozen(head):
            super().__init__(model, case, mesh)


@fault(bugs.LEFT_OUT_AFTER_AN_UNUSED_ONE, source="seen in review", features=("block-experts",))
class NoneEndsUnit(Zero3InParts):
    """The first parameter without a gradient ends the collection of its unit.

    Those after it count as 0 on this rank.
    """

    def reduce(self, flat: FlatParameter, reduction: Reduction) -> None:
        missing = False
        for parameter in flat.parameters:
            missing = missing or parameter.grad is None
            if missing:
                parameter.grad = None
        super().reduce(flat, reduction)


@fault(bugs.AVERAGED_OVER_USERS, source="DS #5618, #6545", features=("sometimes-used",), world=3)
class AveragedOverUsers(Zero1):
    """A gradient is averaged over the ranks that used the parameter, not over all."""

    def _reduce(self) -> None:
        used = [
            torch.stack([view.any() for view in bucket.views(gradients)]).float()
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True)
        ]
        super()._reduce()
        for bucket, gradients, users in zip(self.buckets, self.gradients, used, strict=True):
            dist.all_reduce(users, group=self.group)
            for view, count in zip(bucket.views(gradients), users.tolist(), strict=True):
                view.mul_(self.world_size / max(count, 1.0))


@fault(
    bugs.DIFFERENT_COLLECTIVES, source="PT #158719; torchtitan #2747", features=("side",),
    without=("block-experts", "frozen"), microbatches=1,
)  # fmt: skip
class UnusedNotReduced(Plantable, Fsdp2):
    """FSDP2 by default: each rank reduce-scatters only the gradients that it has."""

    def plant(self) -> None:  # a model that is so when it is built would be refused
        reduce_unused(self.built.model, enable=False)


# Without a gradient other kernels run there: the loss differs in its last bits.
@fault(
    bugs.NOT_UNFROZEN, source="seen often", features=("unfreeze",),
    without=("block-conv", "block-recurrent"),
)  # fmt: skip
class RequiresGradCached(Fsdp2):
    """`requires_grad` is cached when the model is wrapped."""

    def unfreeze(self, names: Collection[str]) -> None:
        pass


@fault(
    bugs.LOCAL_GRADIENT_ONLY, source="Lightning #20340", world=3, features=("unfreeze",),
    without=("sometimes-used", "static-graph"),
)  # fmt: skip
class NotWrappedAgain(Plantable, Ddp):
    """DDP keeps its reducer, which does not reduce unfrozen parameters."""

    def plant(self) -> None:
        self.built: Built = replace(self.built, rewrap=None)


@fault(
    bugs.GRADIENT_OF_A_FROZEN_PARAMETER, source="FS #605 (unused parameters)",
    features=("unfreeze",),
)  # fmt: skip
class FrozenDecays(Plantable, Zero1):
    """Parameters to be unfrozen later have a gradient of zeros before, so AdamW decays them."""

    def plant(self) -> None:
        for one in self.optimizer.owned:
            one.parameter.grad = one.gradient


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
