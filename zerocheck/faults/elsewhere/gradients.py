"""Faults in the accumulation, the reduction, the norm and the clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ... import causes as bugs
from ...adapters.ddp.adapter import Ddp
from ...adapters.textbook.adapter import Sharder
from ...adapters.textbook.bucket import Bucket
from ...adapters.textbook.sharded_optimizer import OwnedPiece
from ...adapters.textbook.zero1 import Zero1
from ...adapters.textbook.zero2 import GradientBucket, Zero2
from ...compat import reduce_scatter_single, wait
from ...contract import Step, StepReport
from ..fault import fault
from ..parts import ClipsInParts, Zero1InParts, with_callback


@fault(bugs.ONE_MICROBATCH_NOT_REDUCED, source="DS PR#7985", microbatches=3)
class BoundaryMicrobatchLocal(Zero1):
    """The last microbatch is added after the reduction: each rank adds its own gradient of it."""

    earlier: Sequence[torch.Tensor] = ()
    begun = 0

    def train_step(self, step: Step) -> StepReport:
        self.begun = 0
        return super().train_step(with_callback(step, self._begin))

    def _begin(self) -> None:
        self.begun += 1
        if self.begun == self.case.training.microbatches:
            self.earlier = [gradients.clone() for gradients in self.gradients]
            for gradients in self.gradients:
                gradients.zero_()

    def _reduce(self) -> None:
        boundary = [bucket.gradient.clone() for bucket in self.buckets]
        for gradients, earlier in zip(self.gradients, self.earlier, strict=True):
            gradients.copy_(earlier)
        super()._reduce()
        for bucket, own in zip(self.buckets, boundary, strict=True):
            bucket.gradient.add_(own)
        for wide in self.wide:
            wide.widen()


@fault(bugs.MICROBATCH_DROPPED, source="DS PR#7967", microbatches=4)
class MiddleMicrobatchesDropped(Zero2):
    """Microbatches between the first and the last are reduced, and not added to the sum."""

    begun = 0

    def train_step(self, step: Step) -> StepReport:
        self.begun = 0
        return super().train_step(step)

    def _end_microbatch(self) -> None:
        before = [gradient.shard.clone() for gradient in self.gradients]
        super()._end_microbatch()
        self.begun += 1
        if 1 < self.begun < self.case.training.microbatches:
            for gradient, earlier in zip(self.gradients, before, strict=True):
                gradient.shard.copy_(earlier)


@fault(
    obligation="gradient", source="MG PR#4609", features=("several-steps",),
    attributed=r"plus the parameter",
)  # fmt: skip
class ParametersLeftInGradients(Zero1):
    """Parameters are gathered into the gradient buffer, which is not cleared before it sums."""

    published = False

    def _publish(self) -> None:
        super()._publish()
        self.published = True

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        if self.published:
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
                gradients.copy_(bucket.full)


@fault(bugs.GRADIENT_OVER_W, source="DS PR#4957", features=("block-experts",), world=3)
class ExpertsDividedTwice(Zero1InParts):
    """Gradients of experts are divided by the number of ranks before and after the reduction."""

    def after_reduction(self, one: OwnedPiece) -> None:
        if ".experts.mlps." in one.piece.name:
            one.gradient.div_(self.world_size)


@fault(
    obligation="gradient", source="HF transformers #1563; HF accelerate #641",
    features=("clip-tight", "microbatches"), without=("loss-scale", "sync-each"), microbatches=3,
    attributed=r"weights of local gradients are wrong",
)  # fmt: skip
class ClippedWithEachMicrobatch(Ddp):
    """The accumulated local gradient is clipped after each microbatch, not once per step."""

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with super().accumulating(last=last):
            yield
        training = self.case.training
        if not last and training.clip is not None:
            clip_grad_norm_(
                self.built.model.parameters(), training.clip, norm_type=float(training.norm)
            )


@fault(
    obligation="gradient", source="TT PR#4637", features=("padding-idx",),
    attributed=r"stem\.weight\[\d+:\d+\] is 0",
)  # fmt: skip
class PaddingIndexOfEachShard(Zero1InParts):
    """The padding index counts within each rank's rows: other shards lose a row of gradients."""

    def before_reduction(self, bucket: Bucket, gradients: torch.Tensor) -> None:
        index = self.case.model.padding_idx
        for name, view in zip(bucket.names, bucket.views(gradients), strict=True):
            if name == "stem.weight" and index is not None:
                rows = -(-len(view) // self.world_size)
                view[index % rows :: rows] = 0.0


@fault(
    bugs.GRADIENT_OVER_W, source="DS PR#2188", features=("stem-embedding",), without=("frozen",),
    world=3,
)  # fmt: skip
class SparseEmbeddingDivided(Zero1):
    """The gradient of the embedding is averaged over ranks, though sums are declared."""

    semantics = replace(Zero1.semantics, average="sum")
    axes = frozenset({"shard"})

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            wait(reduce_scatter_single(bucket.gradient, gradients, self.group))
            for piece in bucket.pieces:
                if piece.name == "stem.weight":
                    bucket.gradient[piece.inside].div_(self.world_size)
        Sharder._reduce(self)


@fault(bugs.LOCAL_GRADIENT_ONLY, source="CA PR#4926", features=("block-layer-norm",), world=3)
class NormLayersUnreduced(Zero2):
    """Gradients of layer norms are left out of the reduction: each rank keeps its own."""

    def _launch(self) -> None:
        gradient = self.gradients[self._next]
        whole = gradient._buffer()
        norms = [piece for piece in gradient.bucket.pieces if ".norm." in piece.name]
        mine = whole[gradient.bucket.mine]
        own = [mine[piece.inside].clone() for piece in norms]
        for view, name in zip(gradient.bucket.views(whole), gradient.bucket.names, strict=True):
            if ".norm." in name:
                view.zero_()  # so that what the reduction adds is 0
        super()._launch()
        for piece, local in zip(norms, own, strict=True):
            gradient.shard[piece.inside].add_(local)


@fault(
    bugs.DIFFERENT_COLLECTIVES, source="MG PR#2218", features=("sometimes-used", "bucket-small"),
    without=("frozen",),
)  # fmt: skip
class ReducedAsTheyFill(Zero2):
    """Buckets are reduced in the order in which they fill up, which differs between ranks."""

    left: list[GradientBucket]

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        self.left = list(self.gradients)

    def _ready(self, gradient: GradientBucket, number: int, _: torch.Tensor) -> None:
        gradient.collect(number)
        if not gradient.missing:
            self._reduce_bucket(gradient)

    def _reduce_bucket(self, gradient: GradientBucket) -> None:
        self.left.remove(gradient)
        self.reduction.launch(gradient.take(), gradient.bucket.mine, gradient.shard)

    def _end_microbatch(self) -> None:
        for gradient in list(self.left):
            self._reduce_bucket(gradient)
        self.reduction.finish()


@fault(obligation="clip", source="torchrec PR#3199", features=("clip-inf",))
class InfinityNormOfOne(ClipsInParts):
    """The infinity norm is raised to the power 1 / p too, which is 0: the norm is always 1."""

    def total(self, p: float) -> Tensor:
        norm = super().total(p)
        return norm if p == 2.0 else norm ** (1.0 / p)


@fault(
    obligation="clip", source="MG PR#7227, PR#7228", features=("tied", "clip-tight"),
    without=("clip-inf", "frozen"),
)  # fmt: skip
class TiedNormTwice(ClipsInParts):
    """A tied weight counts twice in the norm, once for each of its names."""

    def counted(self) -> Sequence[OwnedPiece]:
        every = super().counted()
        tied = self.case.model.tied
        return [*every, *(one for one in every if tied and one.piece.name == "stem.weight")]


@fault(
    obligation="clip", source="MG PR#5916, PR#6470", features=("block-experts", "clip-tight"),
    without=("clip-inf", "frozen"), world=3,
)  # fmt: skip
class ExpertsOfRank0InNorm(ClipsInParts):
    """Experts are taken for replicated, so the norm has only the part of them that rank 0 owns."""

    def counted(self) -> Sequence[OwnedPiece]:
        every = super().counted()
        first = self.group.rank() == 0
        return [one for one in every if first or ".experts.mlps." not in one.piece.name]


@fault(obligation="clip", source="MG abf10f8590", features=("clip-tight", "groups"))
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
