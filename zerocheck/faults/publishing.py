"""Faults in what ranks compute with: updated parameters that do not arrive, or arrive changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..case.schema import Case
from ..compat import all_gather_single
from ..contract import Built, Step, StepReport
from ..implementations.fsdp2 import Fsdp2
from ..implementations.textbook.bucket import Bucket
from ..implementations.textbook.flat import FlatParameter
from ..implementations.textbook.zero1 import Zero1
from ..implementations.textbook.zero2 import Zero2
from ..implementations.textbook.zero3 import Zero3


class GatherStale(Zero3):
    """The forward gathers the parameters of the step before (MG #3140; DS PR#7707).

    Flagged: parameters of the previous step.
    """

    def train_step(self, step: Step) -> StepReport:
        if step.index == 0:
            self.shown = [flat.shard.clone() for flat in self.flats]
        sent, self.shown = self.shown, [flat.shard.clone() for flat in self.flats]
        for flat, stale in zip(self.flats, sent, strict=True):
            flat.shard, stale_shard = stale, flat.shard
            setattr(flat, "fresh", stale_shard)
        reached = step.reached

        def back(moment: str) -> None:
            for flat in self.flats:
                flat.shard = getattr(flat, "fresh")
            reached(moment)  # type: ignore[arg-type]

        object.__setattr__(step, "reached", back)
        return super().train_step(step)


class NotPublished(Zero1):
    """The last bucket is not gathered after the update. Flagged: copies of the previous step."""

    def _publish(self) -> None:
        for bucket in self.buckets[:-1]:
            work = bucket.publish()
            if work is not None:
                work.wait()


class PublishedBeforeUpdate(Zero2):
    """Parameters are gathered before the update (MG #3140). Flagged: copies of the previous step."""

    def train_step(self, step: Step) -> StepReport:
        self.early = True
        return super().train_step(step)

    def _flush(self) -> None:
        super()._flush()
        super()._publish()

    def _publish(self) -> None:
        pass


class PublishedRounded(Zero1):
    """Parameters travel in bf16 though they are fp32 (compute copies, PT #104770).

    Flagged: copies rounded to bf16.
    """

    def _publish(self) -> None:
        for bucket in self.buckets:
            mine = bucket.shard.clone()
            bucket.shard.copy_(mine.bfloat16())
            work = bucket.publish()
            if work is not None:
                work.wait()
            bucket.shard.copy_(mine)


class MetaInitOverwritten(Fsdp2):
    """Parameters are initialised again, on the shards (PT #90465; HF #28244).

    Flagged: initial state.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        for module in built.model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return built

    def restore(self, full: object) -> None:
        """There is none: the checkpoint was read before the initialisation."""
        raise NotImplementedError


class InitStep(Zero1):
    """A real step is taken while the optimizer is made, to make its state (TT #4382).

    Flagged: initial state.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.optimizer.step([group.lr for group in case.optimizer.groups])
        self._publish()


class OutOfOrder(Zero3):
    """The last two gathered shards change places (DS PR#318). Flagged: loss."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.flats:
            flat.__class__ = _Misordered


class _Misordered(FlatParameter):
    def wait(self) -> None:
        arrived = self._work is not None
        super().wait()
        if arrived:
            size = self.group.size()
            one = self.full[self.partition.shard(size - 1)]
            other = self.full[self.partition.shard(size - 2)]
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


class UnitNotGathered(Zero3):
    """One unit is given its memory but not its parameters (bucket reuse, DS PR#5606).

    Flagged: loss, uninitialised memory.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.flats[-1].__class__ = _Empty


class _Empty(FlatParameter):
    def gather(self) -> None:
        if not self.gathered:
            self.storage.resize_(self._bytes)
            self._work = all_gather_single(torch.empty_like(self.full), self.shard, self.group)
            self.gathered = True


__all__ = ["Bucket"]
