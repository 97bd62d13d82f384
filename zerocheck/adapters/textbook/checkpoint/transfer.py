"""Collective writing and reading of a checkpoint: an error on one rank is raised on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ....errors import CheckpointError
from .chunk import Chunk, ReadPlanner, WritePlanner
from .directory import FileEntry, FoundCheckpoint, Writer, find, verify_files

TRAINING = "training.json"
T = TypeVar("T")


def on_all_ranks(group: dist.ProcessGroup, what: str, do: Callable[[], T]) -> list[T]:
    """Call `do` on every rank; return the results of all, in rank order.

    Raises CheckpointError on every rank if it failed on any, so that none waits for another.
    """
    mine: tuple[T | None, str] = (None, "")
    try:
        mine = (do(), "")
    except Exception as error:
        mine = (None, _reason(error))
    answers: list[tuple[T, str]] = [None] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(answers, mine, group)
    _raise_if_any(what, {rank: why for rank, (_, why) in enumerate(answers) if why})
    return [result for result, _ in answers]


def write(
    writer: Writer, chunks: Iterable[Chunk], training: bytes, group: dist.ProcessGroup
) -> None:
    """Write the chunks of all ranks, and rank 0's training facts. Every rank calls this.

    On return the checkpoint is whole, counts, and is on the disk. Raises CheckpointError on every
    rank if it is not; then a whole one counts, the older one in all cases but the last: that the
    disk fails after the pointer was replaced.
    """
    first = group.rank() == 0
    try:
        path = on_all_ranks(group, "begin the checkpoint", writer.begin if first else str)[0]
        _write_tensors(path, chunks, group)

        def seal() -> dict[str, FileEntry]:
            if first:
                Path(path, TRAINING).write_bytes(training)
            return writer.seal(path, written_by(group.rank(), path))

        parts = on_all_ranks(group, "write the checkpoint", seal)
        files = {name: entry for part in parts for name, entry in part.items()}
        on_all_ranks(
            group, "commit the checkpoint", lambda: writer.commit(files) if first else None
        )
    finally:
        writer.end()


def written_by(rank: int, path: str) -> list[str]:
    """Return the files that a rank wrote. A file that names no rank belongs to rank 0.

    Each rank seals its own, since another node's cache is not flushed from here.
    """
    mine = f"__{rank}_"
    return [
        name
        for name in sorted(os.listdir(path))
        if name.startswith(mine) or (rank == 0 and not name.startswith("__"))
    ]


def _write_tensors(path: str, chunks: Iterable[Chunk], group: dist.ProcessGroup) -> None:
    # torch's own sync_files syncs `.metadata` before all of it is written: `seal` does it later.
    storage = FileSystemWriter(path, sync_files=False, overwrite=False)
    state = {chunk.key: chunk for chunk in chunks}
    try:
        save(state, storage_writer=storage, planner=WritePlanner(), process_group=group)
    except CheckpointException as error:
        _raise_if_any("write the checkpoint", _failures(error))
        raise


def find_verified(directory: str, group: dist.ProcessGroup) -> FoundCheckpoint:
    """Find the current checkpoint, the same on every rank, with every byte verified.

    Each rank reads its share of the files. Raises CheckpointError on every rank.
    """
    first = group.rank() == 0
    found = on_all_ranks(group, "find the checkpoint", lambda: find(directory) if first else None)[
        0
    ]
    assert found is not None
    share = sorted(found.files)[group.rank() :: group.size()]
    on_all_ranks(group, "verify the checkpoint", lambda: verify_files(found, share))
    return found


def keys(found: FoundCheckpoint) -> set[str]:
    """Return the tensors of a verified checkpoint. torch unpickles them: verify first."""
    return set(FileSystemReader(found.path).read_metadata().state_dict_metadata)


def read(found: FoundCheckpoint, chunks: Iterable[Chunk], group: dist.ProcessGroup) -> None:
    """Fill the chunks of this rank from a verified checkpoint. Every rank calls this.

    Raises CheckpointError on every rank if one of them asks for what the checkpoint has not.
    """
    state = {chunk.key: chunk for chunk in chunks}
    storage = FileSystemReader(found.path)
    try:
        load(state, storage_reader=storage, planner=ReadPlanner(), process_group=group)
    except CheckpointException as error:
        _raise_if_any("read the checkpoint", _failures(error))
        raise


def _failures(error: CheckpointException) -> dict[int, str]:
    return {rank: _reason(why) for rank, (why, _) in error.failures.items()}


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _raise_if_any(what: str, failed: dict[int, str]) -> None:
    if not failed:
        return
    ranks: dict[str, list[str]] = {}
    for rank, why in sorted(failed.items()):
        ranks.setdefault(why, []).append(str(rank))
    reasons = "; ".join(f"{why} (rank {', '.join(where)})" for why, where in ranks.items())
    raise CheckpointError(f"could not {what}: {reasons}")
