"""Saving and loading of a textbook sharder, split into methods of one meaning each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from ....case.schema import Case
from ....case.segments import in_background
from ....contract.implementation import KEPT, Loader, Saving
from ....errors import CheckpointError
from ....optimizers import rule_of, states_of
from ....optimizers.state_shape import WHOLE
from ..loss_scaling import LossScaler
from ..partition import Piece
from ..sharded_optimizer import OwnedPiece
from . import transfer
from .chunk import Chunk, whole
from .directory import FoundCheckpoint, Writer
from .export import Exporter
from .training import (
    SavedOptions,
    SavedTraining,
    check_fits,
    decoded,
    described,
    encoded,
    options,
    random_states,
    set_random_states,
)


class Resumable(Exporter):
    """Base of sharders with `save` and `load`.

    Stages differ in `flat_buffers`, `_unfreeze` and `_publish`. Each rank writes the ranges that it
    owns, as they are in its shards, and a step count with the first element of its parameter; on a
    replicate axis the first replica does. Tensors that all ranks hold whole are written by rank
    0. Buffers and random states are each rank's own.

    The model is restored bit for bit, on any number of ranks and in any stage. If that number
    differs, rank r takes the buffers of rank r modulo the number that saved, and keeps its random
    state.
    """

    keeps = KEPT
    writer: ClassVar[type[Writer]] = Writer

    case: Case
    scaler: LossScaler
    _saving: Future[None] | None = None
    _group_of_saving: dist.ProcessGroup | None = None

    def _unfreeze(self, names: Collection[str]) -> None:
        """Let these parameters train from now on."""
        raise NotImplementedError

    def _publish(self) -> None:
        """Give every rank the values that it computes with, after the shards have changed."""

    # Saving.

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Write a checkpoint; see Implementation. Raises CheckpointError on every rank.

        In the background the state is copied, and a thread writes the copy while training goes on.
        """
        self.wait_for_saving()
        chunks, training = list(self.written()), encoded(self.training_facts(loader))
        writer = self.writer(directory)
        if not in_background(self.case):
            transfer.write(writer, chunks, training, self.everyone)
            return None
        chunks, group = self.snapshot(chunks), self.group_of_saving()
        return self.start_saving(lambda: transfer.write(writer, chunks, training, group))

    def written(self) -> Iterator[Chunk]:
        """Return all chunks that this rank writes."""
        rank = self.everyone.rank()
        if self.replicas.first:
            yield from self.parameter_chunks()
            yield from self.moment_chunks()
            yield from self.step_chunks(one for one in self.optimizer.owned if one.piece.start == 0)
        if rank == 0:
            yield from self.replica_chunks()
        yield from self.buffer_chunks(rank)
        yield from self.random_chunks(rank)

    def training_facts(self, loader: Loader) -> SavedTraining:
        """Return the part of the checkpoint that is not tensors."""
        return SavedTraining(
            world_size=self.everyone.size(),
            tensors=described(self.model),
            groups=options(self.optimizer.optimizer.param_groups),
            loss_scaler=self.scaler.state_dict(),
            loader=loader.state_dict(),
        )

    def snapshot(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Copy the chunks, so that training cannot change them."""
        return [chunk.copied() for chunk in chunks]

    def start_saving(self, write: Callable[[], None]) -> Saving:
        """Write in a thread."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving = thread.submit(write)
        thread.shutdown(wait=False)
        return self._saving

    def group_of_saving(self) -> dist.ProcessGroup:
        """Return a process group of the same ranks for the thread; every rank calls this.

        In the group of the training its collectives could be taken for those of a step.
        """
        if self._group_of_saving is None:
            # With use_local_synchronization, torch gives the next group of these ranks the name of
            # one that was destroyed, and ranks connect to addresses that are gone.
            self._group_of_saving = dist.new_group(dist.get_process_group_ranks(self.everyone))
        return self._group_of_saving

    def wait_for_saving(self) -> None:
        """Wait until the last checkpoint is written. Errors are raised by its Saving, not here."""
        if self._saving is not None:
            self._saving.exception()
            self._saving = None

    def end_saving(self) -> None:
        """Wait for the last checkpoint and give back the process group."""
        self.wait_for_saving()
        if self._group_of_saving is not None:
            dist.destroy_process_group(self._group_of_saving)
            self._group_of_saving = None

    # Loading.

    def load(self, directory: str, loader: Loader) -> None:
        """Take over the checkpoint; see Implementation. Raises CheckpointError on every rank.

        Nothing is read before every byte was verified.
        """
        self.wait_for_saving()
        found = self.find(directory)
        training = decoded(Path(found.path, transfer.TRAINING).read_bytes())
        check_fits(training, self.model)
        self.take_frozen(training)
        self.make_room(transfer.keys(found))
        self.take_tensors(found, training)
        self.take_groups(training.groups)
        self.optimizer.restore_scalars()
        self.scaler.load_state_dict(training.loss_scaler)
        loader.load_state_dict(training.loader)
        self._publish()

    def find(self, directory: str) -> FoundCheckpoint:
        """Return the current checkpoint, with every byte verified."""
        return transfer.find_verified(directory, self.everyone)

    def take_frozen(self, training: SavedTraining) -> None:
        """Unfreeze the parameters that were unfrozen before the checkpoint."""
        frozen = [name for name, one in self.model.named_parameters() if not one.requires_grad]
        self._unfreeze([name for name in frozen if training.tensors[name].trains])

    def make_room(self, saved: Collection[str]) -> None:
        """Allocate the optimizer's state of the owned pieces, for that in the checkpoint."""
        for one in self.optimizer.owned:
            rule = rule_of(self.case.optimizer, one.piece.name, one.piece.shape)
            roles = [role for role in rule.states if self.key(one.piece.name, role) in saved]
            if not roles:
                continue
            state = self.optimizer.optimizer.state[one.parameter]
            if self.key(one.piece.name, "step") in saved:
                # As torch has it: its fused kernels count where the parameter is.
                where = one.parameter.device if self.case.optimizer.kernel == "fused" else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            for role in roles:
                dtype = rule.state_dtype(role, one.parameter.dtype)
                shape = rule.state_shape(role, one.parameter.dim()) or WHOLE
                state[role] = shape.empty(one.parameter).to(dtype)

    def take_tensors(self, found: FoundCheckpoint, training: SavedTraining) -> None:
        """Read every tensor that this rank holds, into its place."""
        rank, source = self.everyone.rank(), self.source(training)
        replicas, buffers = list(self.replica_chunks()), list(self.buffer_chunks(source))
        same = self.everyone.size() == training.world_size
        randoms = list(self.random_chunks(rank)) if same else []
        state = [
            *self.parameter_chunks(),
            *self.moment_chunks(),
            *self.step_chunks(self.optimizer.owned),
        ]
        transfer.read(found, [*state, *replicas, *buffers, *randoms], self.everyone)
        self.optimizer.restore_counts()
        self.take_whole((one for _, one in self.replicated()), replicas)
        self.take_whole((one for _, one in self.model.named_buffers()), buffers)
        self.take_random(randoms)

    def source(self, training: SavedTraining) -> int:
        """Return the rank of the checkpoint whose buffers this one loads."""
        return self.everyone.rank() % training.world_size

    def take_whole(self, tensors: Iterable[torch.Tensor], chunks: Iterable[Chunk]) -> None:
        """Copy what was read into tensors of any shape and stride."""
        for tensor, chunk in zip(tensors, chunks, strict=True):
            tensor.detach().copy_(chunk.tensor.view(tensor.shape))

    def take_random(self, chunks: Iterable[Chunk]) -> None:
        """Restore the random states of the rank."""
        states = {chunk.key.rpartition(".")[2]: chunk.tensor for chunk in chunks}
        if states:
            set_random_states(states)

    def take_groups(self, saved: Collection[SavedOptions]) -> None:
        """Restore the options of the groups, as torch's optimizers do. A schedule sets lr again."""
        groups = self.optimizer.optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}"
            )
        for group, restored in zip(groups, saved, strict=True):
            (current,) = options([group])
            if current.keys() != restored.keys():
                raise CheckpointError(
                    "the checkpoint is of another optimizer: its options are "
                    f"{', '.join(restored)}, and {', '.join(current)} here"
                )
            group.update(restored)

    # What lies where: written from there, and read into it.

    def key(self, name: str, role: str) -> str:
        """Return the key of a tensor in the checkpoint."""
        return f"model.{name}" if role == "parameter" else f"optimizer.state.{name}.{role}"

    def parameter_chunks(self) -> Iterator[Chunk]:
        """Return the owned ranges of the parameters as chunks."""
        for flat in self.flat_buffers():
            for piece in flat.pieces:
                yield self.chunk(piece, "parameter", flat.shard[piece.inside])

    def moment_chunks(self) -> Iterator[Chunk]:
        """Return the owned ranges of the moments as chunks, if the optimizer has any."""
        for one in self.optimizer.owned:
            state = self.optimizer.optimizer.state.get(one.parameter, {})
            for role in states_of(self.case.optimizer):
                if role in state and state[role].shape == one.parameter.shape:
                    yield self.chunk(one.piece, role, state[role].view(-1))
                elif role in state:  # a factored one, of a parameter that is not partitioned
                    yield whole(self.key(one.piece.name, role), state[role])

    def step_chunks(self, owned: Iterable[OwnedPiece]) -> Iterator[Chunk]:
        """Return the step counts of these pieces as chunks."""
        for one in owned:
            state = self.optimizer.optimizer.state.get(one.parameter, {})
            if "step" in state:
                count = torch.as_tensor(state["step"], dtype=torch.float32)
                yield whole(self.key(one.piece.name, "step"), count)

    def chunk(self, piece: Piece, role: str, tensor: torch.Tensor) -> Chunk:
        """Return a piece as a chunk of its flattened parameter; tensor: 1-D."""
        return Chunk(self.key(piece.name, role), tensor, piece.start, math.prod(piece.shape))

    def replica_chunks(self) -> Iterator[Chunk]:
        """Return the parameters in no flat buffer, which every rank holds whole, as chunks."""
        for name, parameter in self.replicated():
            yield whole(self.key(name, "parameter"), parameter)

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        """Return the buffers as chunks of a rank."""
        for name, buffer in self.model.named_buffers():
            yield whole(f"ranks.{rank}.buffers.{name}", buffer)

    def random_chunks(self, rank: int) -> Iterator[Chunk]:
        """Return the states of the random generators as chunks of a rank."""
        for device, state in random_states(self.optimizer.device).items():
            yield whole(f"ranks.{rank}.random.{device}", state)
