"""Faults of checkpoints: content, loads, restores, exports, the commit of files, and damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import msgspec
import torch

from .. import causes as bugs
from ..adapters.textbook.checkpoint.chunk import Chunk
from ..adapters.textbook.checkpoint.directory import POINTER, PREFIX, FoundCheckpoint, Writer, find
from ..adapters.textbook.checkpoint.export import Whole
from ..adapters.textbook.checkpoint.resumable import Resumable
from ..adapters.textbook.checkpoint.training import SavedOptions, SavedTraining
from ..adapters.textbook.flat import ShardedBuffer
from ..adapters.textbook.partition import Piece
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..contract.groups import learning_rates
from ..contract.implementation import Loader, Saving, Step, StepReport
from ..errors import CheckpointError
from .fault import fault
from .parts import CheckpointInParts


@fault(bugs.STEP_COUNT_LOST, source="DS PR#564, #5263", features=("resume",))
class StepCountLost(CheckpointInParts, Zero1):
    """The step count restarts after a load."""

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            state["step"].zero_()


@fault(
    bugs.OPTIONS_OF_ANOTHER_GROUP, obligation="continuation", source="MG #4705",
    features=("resume", "groups"),
)  # fmt: skip
class GroupsCollapseOnLoad(Zero1):
    """After a load all groups have the options of the first."""

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        first = next(iter(saved))
        super().take_groups([first] * len(saved))


@fault(bugs.OPTIMIZER_STATE_LOST, source="MG #761", features=("resume",))
class StateForAnotherOptimizer(CheckpointInParts, Zero1):
    """The state is loaded into an optimizer that is not the one that steps."""

    def end_load(self) -> None:
        self.optimizer.optimizer.state.clear()


@fault(
    obligation="roundtrip", source="DS PR#7601", features=("resume-more",),
    attributed=r"in the shards? of ranks? .* further (back|on) in|another order of shards",
)  # fmt: skip
class LocalRankShards(Zero3):
    """With two ranks on each node, a rank reads the shards of its local rank.

    The cause has no name: the content of a wrong shard depends on all shapes.
    """

    def load(self, directory: str, loader: Loader) -> None:
        self.node = self.group.rank() // 2
        super().load(directory, loader)

    def chunk(self, piece: Piece, role: str, tensor: torch.Tensor) -> Chunk:
        chunk = super().chunk(piece, role, tensor)
        return replace(chunk, start=0) if getattr(self, "node", 0) else chunk


class OneBucketSaved(CheckpointInParts):
    """Textbook sharder that writes the optimizer state of one bucket alone."""

    bucket: ClassVar[int]

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        name = chunk.key.removeprefix("optimizer.state.").rpartition(".")[0]
        saved = self.flat_buffers()[self.bucket].names
        return [chunk] if not chunk.key.startswith("optimizer") or name in saved else []


@fault(bugs.OPTIMIZER_STATE_LOST, source="DS PR#7585", features=("resume", "bucket-small"))
class FirstBucketSaved(OneBucketSaved, Zero1):
    """Only the optimizer state of the first bucket is written."""

    bucket = 0


@fault(bugs.OPTIMIZER_STATE_LOST, source="MG 9a8420c90a", features=("resume", "bucket-small"))
class EarlierBucketsForgotten(OneBucketSaved, Zero2):
    """Collecting a bucket discards the buckets before it."""

    bucket = -1


@fault(bugs.ROUNDED_TO_BF16, obligation="roundtrip", source="PT #104770", features=("resume",))
class SavesComputeCopy(CheckpointInParts, Zero3):
    """Parameters are written in the compute dtype."""

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        if chunk.key.startswith("model."):
            chunk = replace(chunk, tensor=chunk.tensor.bfloat16().to(chunk.tensor.dtype))
        return [chunk]


@fault(bugs.COPIES_DIFFER, obligation="roundtrip", source="MG #6920", features=("resume",))
class NotPublishedAfterLoad(Zero1):
    """Each rank loads the parameters that it updates, and none are sent."""

    loading = False

    def load(self, directory: str, loader: Loader) -> None:
        self.loading = True
        super().load(directory, loader)
        self.loading = False

    def _publish(self) -> None:
        if not self.loading:
            super()._publish()


@fault(bugs.DATA_POSITION_OF_ONE_RANK, source="TT #816", features=("resume",))
class DataPositionOfOneRank(CheckpointInParts, Zero3):
    """The state of the loader is as if only this rank read."""

    def position(self, count: int) -> int:
        return count // self.group.size()


@fault(bugs.DATA_POSITION_LOST, source="TT #816", features=("resume",))
class DataPositionLost(CheckpointInParts, Zero2):
    """The data loader restarts."""

    def position(self, count: int) -> int:
        return 0


@fault(bugs.RANDOM_STATE_OF_RANK_0_ON_ALL_RANKS, source="MG #6858", features=("resume-same",))
class RngOneForAll(Zero1):
    """Every rank draws rank 0's random numbers."""

    loading = False

    def take_tensors(self, found: FoundCheckpoint, training: SavedTraining) -> None:
        self.loading = True
        super().take_tensors(found, training)
        self.loading = False

    def random_chunks(self, rank: int) -> Iterator[Chunk]:
        return super().random_chunks(0 if self.loading else rank)


class LoadsWhatIsThere(Resumable):
    """Textbook sharder that keeps the whole tensors of which it reads no chunks."""

    def take_whole(self, tensors: Iterable[torch.Tensor], chunks: Iterable[Chunk]) -> None:
        if chunks := list(chunks):
            super().take_whole(tensors, chunks)


@fault(bugs.BUFFERS_NOT_LOADED, source="PT #178569", features=("resume", "block-batch-norm"))
class BuffersNotLoaded(LoadsWhatIsThere, Zero3):
    """Buffers are not restored."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        return iter(())


@fault(bugs.BUFFERS_NOT_LOADED, source="FS #427", features=("resume", "block-batch-norm"))
class BuffersCast(Zero1):
    """All buffers pass through half precision."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        for chunk in super().buffer_chunks(rank):
            yield replace(chunk, tensor=chunk.tensor.half().to(chunk.tensor.dtype))


@fault(bugs.LOSS_SCALE_BEGINS_ANEW, source="none known", features=("resume", "overflow"))
class LossScaleLost(Zero3):
    """The loss scale restarts at its initial value."""

    def training_facts(self, loader: Loader) -> SavedTraining:
        return msgspec.structs.replace(super().training_facts(loader), loss_scaler=None)


@fault(bugs.MOMENTS_LOST, source="none known", features=("resume", "amsgrad"))
class MaximumLost(CheckpointInParts, Zero1):
    """The maximum of amsgrad is left out."""

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        return [] if "max_exp_avg_sq" in chunk.key else [chunk]

    def end_load(self) -> None:
        optimizer = self.optimizer.optimizer
        for state in optimizer.state.values() if optimizer.param_groups[0]["amsgrad"] else ():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])


@fault(bugs.MOMENTS_SWAPPED, obligation="roundtrip", source="none known", features=("resume",))
class SavedMomentsSwapped(CheckpointInParts, Zero3):
    """exp_avg_sq is written as exp_avg, and the other way round."""

    def save_chunk(self, chunk: Chunk) -> Iterable[Chunk]:
        other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        head, _, role = chunk.key.rpartition(".")
        return [replace(chunk, key=f"{head}.{other.get(role, role)}")]


@fault(bugs.FROZEN_PARAMETER_NOT_LOADED, source="none known", features=("resume", "frozen"))
class FrozenNotSaved(LoadsWhatIsThere, Zero2):
    """Only trainable parameters are saved and loaded."""

    def replica_chunks(self) -> Iterator[Chunk]:
        return iter(())


@fault(bugs.STATE_OF_A_LATER_STEP, source="none known", features=("resume-background",))
class WrittenWhileTraining(Zero3):
    """State is written in the background without a copy."""

    def snapshot(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        return list(chunks)

    def start_saving(self, write: Callable[[], None]) -> Saving:
        # Like a slow disk: written only when it is waited for.
        return cast(Saving, SimpleNamespace(result=write))


@fault(
    bugs.LEARNING_RATE_OF_ANOTHER_STEP, obligation="continuation", source="TT #275",
    features=("resume", "schedule-warmup"),
)  # fmt: skip
class ScheduleLost(Zero1):
    """Learning rates come from a schedule that no checkpoint holds."""

    taken = 0

    def train_step(self, step: Step) -> StepReport:
        rates = tuple(learning_rates(self.case, self.taken))
        self.taken += 1
        return super().train_step(replace(step, lr=rates))


@fault(bugs.CHANGED_BY_SAVING, source="none known", features=("resume",))
class SavingSteps(Zero2):
    """Saving takes an optimizer step, to have a state to write."""

    def written(self) -> Iterator[Chunk]:
        for state in self.optimizer.optimizer.state.values():
            state["step"] += 1
        return super().written()


Full = Mapping[tuple[str, str], torch.Tensor]


@fault(bugs.INITIAL_STATE, source="DS PR#564, #5263", features=("mid-training",))
class StepLostOnLoad(Zero1):
    """The step count of a restored state restarts."""

    def restore(self, full: Full) -> None:
        super().restore(
            {key: torch.zeros(()) if key[1] == "step" else one for key, one in full.items()}
        )


@fault(bugs.COPIES_DIFFER, source="MG #6920", features=("mid-training",))
class NoGatherAfterLoad(Zero1):
    """Each rank loads the parameters that it updates, and none are sent."""

    def restore(self, full: Full) -> None:
        old = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        super().restore(full)
        mine = [bucket.shard.clone() for bucket in self.buckets]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.detach().copy_(old[name])
        for bucket, shard in zip(self.buckets, mine, strict=True):
            bucket.shard.copy_(shard)


@fault(bugs.INITIAL_STATE, source="MG #761", features=("mid-training", "moments-typical"))
class StateStaleAfterLoad(Zero1):
    """The state is loaded into an optimizer that is not the one that steps."""

    def restore(self, full: Full) -> None:
        super().restore(full)
        self.optimizer.optimizer.state.clear()


@fault(bugs.CHANGED_BY_SAVING, source="DS PR#6792", features=("resume",))
class ExportMutates(Zero1):
    """The exporter gathers into live memory."""

    def gathered(self, flat: ShardedBuffer, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for piece in flat.pieces:
            if piece.name in held:
                flat.shard[piece.inside] = held[piece.name]
        return super().gathered(flat, held)


@fault(
    obligation="export", source="DS #1380", features=("resume", "uneven"),
    attributed=r"elements? further (back|on) in (its|their) flat buffers?",
)  # fmt: skip
class PaddingStrippedWrong(Zero3):
    """The padding at the end is removed from the front."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        gap = flat.partition.padding(0, flat.partition.numel)
        ends = bool(gap) and gap[-1].stop == flat.partition.numel
        return super().split(
            flat, role, whole.roll(gap[-1].start - gap[-1].stop) if ends else whole
        )


@fault(bugs.PART_OF_IT_IS_0, source="DS PR#7585", features=("resume",))
class ExportOfOneRank(Zero1):
    """Exported moments are those of rank 0, and 0 elsewhere."""

    def owned_state(self, role: str) -> dict[str, torch.Tensor]:
        return super().owned_state(role) if self.group.rank() == 0 or role == "step" else {}


@fault(bugs.ROUNDED_TO_BF16, obligation="export", source="PT #104770", features=("resume",))
class ExportRounded(Zero2):
    """Parameters are exported in the compute dtype."""

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        if role == "parameter":
            whole = whole.bfloat16().to(whole.dtype)
        return super().split(flat, role, whole)


@fault(bugs.LEFT_OUT, source="none known", features=("resume", "frozen"))
class ExportWithoutFrozen(Zero1):
    """Frozen parameters are left out of the export."""

    def replicated(self):  # type: ignore[no-untyped-def]
        return [] if getattr(self, "exporting", False) else super().replicated()

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        self.exporting = True
        try:
            return super().export()
        finally:
            self.exporting = False


class _OldRemovedFirst(Writer):
    def remove_leftovers(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class OldRemovedFirst(Zero1):
    """The old checkpoint is removed before the new one exists."""

    writer = _OldRemovedFirst


class _InPlace(Writer):
    """Writer of a single generation, whose files are overwritten."""

    def begin(self) -> str:
        path = super().begin()
        others = [one for one in self.directory.glob(f"{PREFIX}*") if str(one) != path]
        if not others:
            return path
        kept = others[0]
        Path(path).rmdir()
        self._fresh = kept
        for file in kept.iterdir():
            file.unlink()
        return str(kept)


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class WrittenInPlace(Zero2):
    """The new checkpoint is written over the old one's files."""

    writer = _InPlace


class _PointerFirst(Writer):
    def begin(self) -> str:
        path = super().begin()
        (self.directory / POINTER).write_text(f"{Path(path).name}\n")
        return path


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class PointerFirst(Zero3):
    """The new checkpoint becomes current before it is whole."""

    writer = _PointerFirst


@fault(bugs.DAMAGED(damage="mix"), source="none known", features=("resume-mix",))
class FilesNotVerified(Zero1):
    """Checksums are written, and never read."""

    def find(self, directory: str) -> FoundCheckpoint:
        return find(directory)


@fault(bugs.DAMAGED(damage="mix"), source="none known", features=("resume-mix",))
class SizesAlone(Zero3):
    """Only the size of each file is checked."""

    def find(self, directory: str) -> FoundCheckpoint:
        found = find(directory)
        for name, entry in found.files.items():
            if Path(found.path, name).stat().st_size != entry.size:
                raise CheckpointError(f"{name} has another size than when it was saved")
        return found
