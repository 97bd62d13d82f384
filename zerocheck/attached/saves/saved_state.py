"""Record of the state that was saved, and its comparison with what was loaded.

    checkpoint-1000/
      zerocheck.json             digests of all tensors, options, step counts, random states
      zerocheck-next.json        options with which the next step began
      zerocheck-samples.safetensors   samples that were given in this epoch, where they are followed

It is read on any number of ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from ...case.codec import parse
from ...checkpoint.whole_files import OPENERS
from ...contract.names import named_parameters, unwrapped
from ...contract.shard import Shard
from ...drive.recorder import entry_of
from ...errors import UsageError
from ...run.records.journal import encode
from ..record.axes import Parts
from ..record.digests import PartDigest, WholeDigest, digest_of, whole_of
from ..record.holdings import count_of, holdings, local, shards_of
from ..record.optimizers import JobOptimizers, group_options
from ..record.ranks import AllRanks
from ..record.step_record import GroupOptions

NAME = "zerocheck.json"
NEXT = "zerocheck-next.json"
FORMAT = 1
WEIGHTS = ("parameter", "buffer")
"""Roles of what a model has."""


def record_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's record: itself, or one beside a file of weights."""
    if isdir(checkpoint) or checkpoint.suffix not in OPENERS:
        return checkpoint
    return checkpoint.with_name(f"{checkpoint.name}.zerocheck")


def has_record(checkpoint: Path) -> bool:
    """Return True if a record of a checkpoint was written."""
    return isfile(record_folder(checkpoint) / NAME)


class TrainedModel(NamedTuple):
    """Model of a job with its optimizers. parts: what its parameters are a part of."""

    model: nn.Module
    optimizers: JobOptimizers
    parts: Parts


class RankState(msgspec.Struct, frozen=True):
    """State of one rank.

    parts: (role, digest); counts: step counts by parameter; random: digests by generator.
    """

    parts: list[tuple[str, PartDigest]]
    counts: dict[str, float]
    random: dict[str, str]


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """State of all ranks.

    tensors: by role and name; buffers: by name, those that other ranks than the first have, where
    running statistics are each rank's own; counts: step counts by parameter; options: of the
    parameter groups; members: names in each group, "" for what has none, such as flat parameters;
    random: by rank; data: what the script said of its position in the data.
    """

    saved: int = FORMAT
    step: int
    world_size: int
    tensors: dict[str, dict[str, WholeDigest]]
    buffers: dict[str, tuple[WholeDigest, ...]]
    counts: dict[str, float]
    options: tuple[GroupOptions, ...]
    members: tuple[tuple[str, ...], ...] = ()
    random: tuple[dict[str, str], ...]
    data: Any = None

    @property
    def weights(self) -> dict[str, WholeDigest]:
        """Parameters and buffers, which files do not tell apart."""
        return {name: one for role in WEIGHTS for name, one in self.tensors.get(role, {}).items()}


class LiveState(msgspec.Struct, frozen=True):
    """State of a live run.

    copies: (role, name, ranks) whose copies are other than those of the first rank.
    """

    saved: SavedState
    copies: list[tuple[str, str, tuple[int, ...]]] = []


def state_of(
    trained: TrainedModel, ranks: AllRanks, *, step: int, data: Any, rounds: bool = True
) -> LiveState | None:
    """Return the state of the run, on rank 0; None on others. Every rank calls this.

    rounds: with digests of what is rounded to bf16, to recognise it in a load.
    """
    gathered = ranks.gather(msgspec.msgpack.encode(_of_rank(trained, rounds=rounds)))
    if ranks.rank:
        return None
    every = [msgspec.msgpack.decode(one, type=RankState) for one in gathered]
    by_tensor: dict[tuple[str, str], list[tuple[int, PartDigest]]] = {}
    for rank, one in enumerate(every):
        for role, part in one.parts:
            by_tensor.setdefault((role, part.entry.name), []).append((rank, part))
    tensors: dict[str, dict[str, WholeDigest]] = {}
    copies, buffers = [], {}
    for (role, name), parts in by_tensor.items():
        first: dict[object, PartDigest] = {}
        for _, part in parts:
            first.setdefault(part.place, part)
        others = tuple(rank for rank, part in parts if part.total != first[part.place].total)
        if role == "buffer":
            owned = [whole_of([part]) for rank, part in parts if rank in others]
            buffers[name] = tuple(one for one in dict.fromkeys(owned) if one is not None)
        elif others:
            copies.append((role, name, others))
        whole = whole_of(first.values())
        if whole is not None:
            tensors.setdefault(role, {})[name] = whole
    counts: dict[str, float] = {}
    for one in every:
        counts |= one.counts
    saved = SavedState(
        step=step,
        world_size=ranks.size,
        tensors=tensors,
        buffers=buffers,
        counts=counts,
        options=group_options(trained.optimizers),
        members=tuple(_members(trained)),
        random=tuple(one.random for one in every),
        data=data,
    )
    return LiveState(saved, copies)


def _members(trained: TrainedModel) -> Iterator[tuple[str, ...]]:
    """Yield the names of the parameters in each group."""
    names = {id(one): name for name, one in named_parameters(trained.model)}
    for optimizer in trained.optimizers:
        for group in optimizer.param_groups:
            yield tuple(names.get(id(one), "") for one in group["params"])


def _of_rank(trained: TrainedModel, *, rounds: bool) -> RankState:
    model, states = trained.model, trained.optimizers.states
    parts: list[tuple[str, PartDigest]] = []
    counts: dict[str, float] = {}
    for holding in holdings(model, trained.parts):
        for role, shard in shards_of(holding, states):
            assert shard.tensor is not None
            parts.append((role, digest_of(shard.tensor, entry_of(shard), rounds=rounds)))
        count = count_of(holding, states)
        if count is not None:
            counts[holding.name] = count
    parts.extend(("buffer", digest_of(local(one), entry)) for entry, one in _buffers(model))
    return RankState(parts, counts, _random_states())


def _buffers(model: nn.Module) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the buffers that a state_dict has."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                whole = local(buffer)
                given = unwrapped(f"{path}.{name}" if path else name)
                shard = Shard(given, "buffer", whole, tuple(whole.shape))
                yield entry_of(shard), whole


def _random_states() -> dict[str, str]:
    found = {"python": _hash(repr(random.getstate()).encode())}
    kind, keys, *rest = np.random.get_state()
    found["numpy"] = _hash(repr((kind, rest)).encode() + np.asarray(keys).tobytes())
    found["torch"] = _hash(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available():
        found["torch.cuda"] = _hash(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def write_saved(folder: Path, state: SavedState) -> None:
    """Write the record into its folder."""
    (folder / NAME).write_bytes(encode(state))


def record_weights(directory: Path, weights: TrainedModel, ranks: AllRanks, *, step: int) -> None:
    """Write the record of a model alone. Every rank calls this."""
    state = state_of(weights, ranks, step=step, data=None)
    if state is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_saved(directory, state.saved)


class NextStep(msgspec.Struct, frozen=True):
    """Options of the parameter groups when the step after a save began."""

    step: int
    options: tuple[GroupOptions, ...]

    def write(self, folder: Path) -> None:
        """Write them next to a record, unless the checkpoint was moved or deleted."""
        if has_record(folder):
            (folder / NEXT).write_bytes(encode(self))

    @classmethod
    def read(cls, checkpoint: Path) -> NextStep | None:
        """Read them; None where the job ended before its next step, or while it wrote them."""
        try:
            path = record_folder(checkpoint) / NEXT
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None


def read_saved(checkpoint: Path) -> SavedState:
    """Read a record. Raises UsageError for what is missing, damaged or of another format."""
    path = record_folder(checkpoint) / NAME
    try:
        raw: Any = parse(path.read_bytes(), source=str(path))
        found = msgspec.convert(raw, SavedState, strict=False)
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}: check.saved(directory) writes it, in the run that saves"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is no record of a saved state: {error}") from None
    if found.saved != FORMAT:
        raise UsageError(f"{path} has format {found.saved}; this zerocheck knows format {FORMAT}")
    return found
