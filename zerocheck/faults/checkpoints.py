"""Faults in the content of a checkpoint, or in what a load takes from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import msgspec
import torch

from ..adapters.textbook.checkpoint.chunk import Chunk
from ..adapters.textbook.checkpoint.directory import FoundCheckpoint
from ..adapters.textbook.checkpoint.resumable import Resumable
from ..adapters.textbook.checkpoint.training import SavedOptions, SavedTraining
from ..adapters.textbook.partition import Piece
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..contract.groups import learning_rates
from ..contract.implementation import Loader, Step, StepReport


class StepCountLost(Zero1):
    """The step count restarts (DS PR#564, #5263). Flagged: step count lost."""

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        super().take_groups(saved)
        for state in self.optimizer.optimizer.state.values():
            state["step"].zero_()


class GroupsCollapseOnLoad(Zero1):
    """All groups get the options of the first (MG #4705). Flagged: options of another group."""

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        first = next(iter(saved))
        super().take_groups([first] * len(saved))


class StateForAnotherOptimizer(Zero1):
    """The state is loaded into an optimizer that is not the one that steps (MG #761).

    Flagged: optimizer state lost.
    """

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        super().take_groups(saved)
        self.optimizer.optimizer.state.clear()


class LocalRankShards(Zero3):
    """With two ranks on each node, a rank reads the shards of its local rank (DS PR#7601).

    Flagged: not named: what stands where depends on all shapes.
    """

    def load(self, directory: str, loader: Loader) -> None:
        self.node = self.group.rank() // 2
        super().load(directory, loader)

    def chunk(self, piece: Piece, role: str, tensor: torch.Tensor) -> Chunk:
        chunk = super().chunk(piece, role, tensor)
        return replace(chunk, start=0) if getattr(self, "node", 0) else chunk


class _OneBucketSaved(Resumable):
    """The optimizer state of one bucket alone is written."""

    bucket: ClassVar[int]

    def written(self) -> Iterator[Chunk]:
        kept = {name for name, _ in self.flat_buffers()[self.bucket].partition.shapes}
        for chunk in super().written():
            name = chunk.key.removeprefix("optimizer.state.").rpartition(".")[0]
            if not chunk.key.startswith("optimizer") or name in kept:
                yield chunk


class FirstBucketSaved(_OneBucketSaved, Zero1):
    """Only the first bucket is written (DS PR#7585). Flagged: optimizer state lost."""

    bucket = 0


class EarlierBucketsForgotten(_OneBucketSaved, Zero2):
    """Collecting a bucket discards the buckets before it (MG 9a8420c90a).

    Flagged: optimizer state lost.
    """

    bucket = -1


class SavesComputeCopy(Zero3):
    """Parameters pass through the compute dtype (PT #104770). Flagged: rounded to bf16."""

    def written(self) -> Iterator[Chunk]:
        for chunk in super().written():
            if chunk.key.startswith("model."):
                rounded = chunk.tensor.bfloat16().to(chunk.tensor.dtype)
                yield replace(chunk, tensor=rounded)
            else:
                yield chunk


class NotPublishedAfterLoad(Zero1):
    """Each rank loads the parameters that it updates, and none are sent (MG #6920)."""

    loading = False

    def load(self, directory: str, loader: Loader) -> None:
        self.loading = True
        super().load(directory, loader)
        self.loading = False

    def _publish(self) -> None:
        if not self.loading:
            super()._publish()


class DataPositionOfOneRank(Zero3):
    """The state of the loader is as if only this rank read (TT #816).

    Flagged: data position of one rank.
    """

    def training_facts(self, loader: Loader) -> SavedTraining:
        facts = super().training_facts(loader)
        own = {name: count // self.group.size() for name, count in facts.loader.items()}
        return msgspec.structs.replace(facts, loader=own)


class DataPositionLost(Zero2):
    """The loader restarts. Flagged: data position lost."""

    def training_facts(self, loader: Loader) -> SavedTraining:
        facts = super().training_facts(loader)
        return msgspec.structs.replace(facts, loader=dict.fromkeys(facts.loader, 0))


class RngOneForAll(Zero1):
    """Every rank draws rank 0's random numbers (MG #6858). Flagged: random state of rank 0."""

    loading = False

    def take_tensors(self, found: FoundCheckpoint, training: SavedTraining) -> None:
        self.loading = True
        super().take_tensors(found, training)
        self.loading = False

    def random_chunks(self, rank: int) -> Iterator[Chunk]:
        return super().random_chunks(0 if self.loading else rank)


class BuffersNotLoaded(Zero3):
    """Buffers are not restored (PT #178569). Flagged: buffers not loaded."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        return iter(())

    def take_whole(self, tensors: Iterable[torch.Tensor], chunks: Iterable[Chunk]) -> None:
        if chunks := list(chunks):
            super().take_whole(tensors, chunks)


class BuffersCast(Zero1):
    """All buffers pass through half precision (FS #427)."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        for chunk in super().buffer_chunks(rank):
            yield replace(chunk, tensor=chunk.tensor.half().to(chunk.tensor.dtype))


class LossScaleLost(Zero3):
    """The loss scale restarts at its initial value. Flagged: loss scale begins anew."""

    def training_facts(self, loader: Loader) -> SavedTraining:
        return msgspec.structs.replace(super().training_facts(loader), loss_scaler=None)


class MaximumLost(Zero1):
    """The maximum of amsgrad is left out. Flagged: moments lost."""

    def written(self) -> Iterator[Chunk]:
        return (chunk for chunk in super().written() if "max_exp_avg_sq" not in chunk.key)

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        super().take_groups(saved)
        optimizer = self.optimizer.optimizer
        for state in optimizer.state.values() if optimizer.param_groups[0]["amsgrad"] else ():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])


class SavedMomentsSwapped(Zero3):
    """exp_avg_sq is written as exp_avg, and the other way round. Flagged: moments swapped."""

    def written(self) -> Iterator[Chunk]:
        other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        for chunk in super().written():
            head, _, role = chunk.key.rpartition(".")
            yield replace(chunk, key=f"{head}.{other.get(role, role)}")


class FrozenNotSaved(Zero2):
    """Only trainable parameters are saved and loaded. Flagged: frozen parameter not loaded."""

    def replica_chunks(self) -> Iterator[Chunk]:
        return iter(())

    def take_whole(self, tensors: Iterable[torch.Tensor], chunks: Iterable[Chunk]) -> None:
        if chunks := list(chunks):
            super().take_whole(tensors, chunks)


class WrittenWhileTraining(Zero3):
    """State is written in the background without a copy. Flagged: state of a later step."""

    def snapshot(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        return list(chunks)

    def start_saving(self, write):  # type: ignore[no-untyped-def]
        return _Late(write)


class _Late:
    """Saving that writes only when it is waited for, like a slow disk."""

    def __init__(self, write) -> None:  # type: ignore[no-untyped-def]
        self._write = write

    def result(self) -> object:
        return self._write()


class ScheduleLost(Zero1):
    """Learning rates come from a schedule that no checkpoint holds (TT #275)."""

    taken = 0

    def train_step(self, step: Step) -> StepReport:
        rates = tuple(learning_rates(self.case, self.taken))
        self.taken += 1
        return super().train_step(replace(step, lr=rates))


class SavingSteps(Zero2):
    """To have a state to write, the optimizer takes a step. Flagged: changed by saving."""

    def written(self) -> Iterator[Chunk]:
        for state in self.optimizer.optimizer.state.values():
            state["step"] += 1
        return super().written()
