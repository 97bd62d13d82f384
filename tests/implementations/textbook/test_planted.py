"""Known faults of checkpoints, as overrides of one method each: the tests of resuming see them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.contract.implementation import Loader
from zerocheck.implementations.textbook.checkpoint.chunk import Chunk
from zerocheck.implementations.textbook.checkpoint.export import Flat, Whole
from zerocheck.implementations.textbook.checkpoint.resumable import Resumable
from zerocheck.implementations.textbook.checkpoint.training import Options, Training
from zerocheck.implementations.textbook.partition import Piece
from zerocheck.implementations.textbook.zero1 import Zero1
from zerocheck.implementations.textbook.zero3 import Zero3

from ..driver import in_ranks
from .resuming import (
    Data,
    Held,
    Job,
    check_equal,
    check_exported,
    held,
    load_all,
    save_all,
    trained,
)
from .test_resume import KINDS, _placed


class StepLost(Zero1):
    """The step count begins anew (DS PR#564, #5263)."""

    def take_groups(self, saved: Collection[Options]) -> None:
        super().take_groups(saved)
        for state in self.optimizer.optimizer.state.values():
            state["step"].zero_()


class GroupsCollapse(Zero1):
    """All groups get the options of the first (MG #4705)."""

    def take_groups(self, saved: Collection[Options]) -> None:
        first = next(iter(saved))
        super().take_groups([first] * len(saved))


class GroupsStale(Zero1):
    """The state is loaded into an optimizer that is not the one that steps (MG #761)."""

    def take_groups(self, saved: Collection[Options]) -> None:
        super().take_groups(saved)
        self.optimizer.optimizer.state.clear()


class LocalRankShards(Zero3):
    """On the second node, with two ranks each, ranges begin where they do on the first (DS)."""

    def load(self, directory: str, loader: Loader) -> None:
        self.node = self.group.rank() // 2
        super().load(directory, loader)

    def chunk(self, piece: Piece, role: str, tensor: torch.Tensor) -> Chunk:
        chunk = super().chunk(piece, role, tensor)
        return replace(chunk, start=0) if getattr(self, "node", 0) else chunk


class FirstGroupSaved(Zero3):
    """Only the moments of one group are written (DS PR#7585)."""

    def written(self) -> Iterator[Chunk]:
        for chunk in super().written():
            if not (chunk.key.startswith("optimizer") and ".bias" not in chunk.key):
                yield chunk


class BucketsRecreated(Zero1):
    """What is collected of a bucket forgets the buckets before (MG 9a8420c90a)."""

    def written(self) -> Iterator[Chunk]:
        last = {name for name, _ in self.flat_buffers()[-1].partition.shapes}
        for chunk in super().written():
            name = chunk.key.removeprefix("optimizer.state.").rpartition(".")[0]
            if not chunk.key.startswith("optimizer") or name in last:
                yield chunk


class SavesComputeCopy(Zero3):
    """Parameters pass through the dtype of compute (PT #104770)."""

    def written(self) -> Iterator[Chunk]:
        for chunk in super().written():
            if chunk.key.startswith("model."):
                rounded = chunk.tensor.bfloat16().to(chunk.tensor.dtype)
                yield replace(chunk, tensor=rounded)
            else:
                yield chunk


class NoGatherAfterLoad(Zero1):
    """Each rank loads what it updates, and nobody sends it (MG #6920)."""

    loading = False

    def load(self, directory: str, loader: Loader) -> None:
        self.loading = True
        super().load(directory, loader)

    def _publish(self) -> None:
        if not self.loading:
            super()._publish()


class DataPositionLost(Zero3):
    """The state of the loader is as if only this rank read (TT #816)."""

    def training_facts(self, loader: Loader) -> Training:
        whole = loader.state_dict()["samples"]
        return super().training_facts(Data(whole // self.group.size()))


class RngOneForAll(Zero1):
    """Every rank draws what rank 0 draws (MG #6858)."""

    def take_tensors(self, found, training):  # type: ignore[no-untyped-def]
        self.random_chunks = lambda _: Zero1.random_chunks(self, 0)  # type: ignore[method-assign]
        super().take_tensors(found, training)


class BuffersUninitialised(Zero3):
    """Buffers are not restored (PT #178569)."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        return iter(())

    def take_whole(self, tensors, chunks):  # type: ignore[no-untyped-def]
        if chunks:
            super().take_whole(tensors, chunks)


class BuffersCast(Zero1):
    """All buffers pass through half precision (FS #427)."""

    def buffer_chunks(self, rank: int) -> Iterator[Chunk]:
        for chunk in super().buffer_chunks(rank):
            yield replace(chunk, tensor=chunk.tensor.half().to(chunk.tensor.dtype))


class BuffersOfRank0(Zero1):
    """Running statistics of rank 0 for every rank, where each has its own."""

    def source(self, training: Training) -> int:
        return 0


class LossScaleLost(Zero3):
    """The loss scale begins anew."""

    def training_facts(self, loader: Loader) -> Training:
        facts = super().training_facts(loader)
        return Training(
            **{
                name: getattr(facts, name)
                for name in facts.__struct_fields__
                if name != "loss_scaler"
            },
            loss_scaler=None,
        )


class UnfreezingLost(Zero1):
    """What was unfrozen is frozen again."""

    def take_frozen(self, training: Training) -> None:
        pass


class MaximumLost(Zero1):
    """The maximum of amsgrad is left out."""

    def written(self) -> Iterator[Chunk]:
        return (chunk for chunk in super().written() if "max_exp_avg_sq" not in chunk.key)


class MomentsSwapped(Zero3):
    """exp_avg_sq is written as exp_avg, and the other way round."""

    def written(self) -> Iterator[Chunk]:
        other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
        for chunk in super().written():
            head, _, role = chunk.key.rpartition(".")
            yield replace(chunk, key=f"{head}.{other.get(role, role)}")


class ExportMutates(Zero1):
    """The exporter gathers from live memory (DS PR#6792)."""

    def gathered(self, flat: Flat, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        for piece in flat.pieces:
            if piece.name in held:
                flat.shard[piece.inside] = held[piece.name]
        return super().gathered(flat, held)


class PaddingStrippedWrong(Zero3):
    """The padding at the end is taken off the front (DS #1380)."""

    def cut(self, flat: Flat, role: str, whole: torch.Tensor) -> Whole:
        gap = flat.partition.padding(0, flat.partition.numel)
        ends = bool(gap) and gap[-1].stop == flat.partition.numel
        return super().cut(flat, role, whole.roll(gap[-1].start - gap[-1].stop) if ends else whole)


class ExportOfOneRank(Zero1):
    """Moments are those of rank 0, and 0 elsewhere."""

    def owned_state(self, role: str) -> dict[str, torch.Tensor]:
        return super().owned_state(role) if self.group.rank() == 0 or role == "step" else {}


N = 2
LOADS: dict[type[Resumable], tuple[str, int]] = {
    StepLost: ("groups", 3),
    GroupsCollapse: ("groups", 3),
    GroupsStale: ("groups", 3),
    LocalRankShards: ("groups", 5),
    FirstGroupSaved: ("groups", 3),
    BucketsRecreated: ("groups", 3),
    SavesComputeCopy: ("groups", 3),
    NoGatherAfterLoad: ("groups", 3),
    DataPositionLost: ("groups", 3),
    RngOneForAll: ("groups", 2),
    BuffersUninitialised: ("buffers", 3),
    BuffersCast: ("buffers", 3),
    BuffersOfRank0: ("buffers", 3),
    LossScaleLost: ("groups", 3),
    UnfreezingLost: ("unfrozen", 3),
    MaximumLost: ("groups", 3),
    MomentsSwapped: ("groups", 3),
}
"""A fault, and a case that shows it: its kind and M."""

EXPORTS = (ExportMutates, PaddingStrippedWrong, ExportOfOneRank)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Resumable], list[list[Held]]]:
    """What was held when each fault saved, and after it loaded. All in few lives of the ranks."""
    folder = tmp_path_factory.mktemp("planted")

    def jobs(faults: Iterable[type[Resumable]], world_size: int) -> list[Job]:
        return [
            Job(fault, _placed(KINDS[LOADS[fault][0]], world_size, 0), str(folder / fault.__name__))
            for fault in faults
        ]

    saved = in_ranks(N, save_all, jobs(LOADS, N))
    seen = {fault: [[rank[k] for rank in saved]] for k, fault in enumerate(LOADS)}
    for m in sorted({m for _, m in LOADS.values()}):
        faults = [fault for fault, (_, its) in LOADS.items() if its == m]
        loaded = in_ranks(m, load_all, jobs(faults, m))
        for k, fault in enumerate(faults):
            seen[fault].append([rank[k] for rank in loaded])
    return seen


@pytest.mark.parametrize("fault", LOADS, ids=lambda fault: fault.__name__)
def test_a_fault_of_checkpoints_is_seen(
    resumed: dict[type[Resumable], list[list[Held]]], fault: type[Resumable]
) -> None:
    saved, loaded = resumed[fault]
    with pytest.raises(AssertionError):
        check_equal(saved, loaded)


def _export(mesh: DeviceMesh, job: Job) -> Held:
    sharder = trained(mesh, job)
    seen = held(sharder, Data(0))
    after = held(sharder, Data(0), export=False)
    sharder.close()
    return replace(seen, views=after.views)


@pytest.mark.parametrize("fault", EXPORTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_exports_is_seen(fault: type[Resumable]) -> None:
    job = Job(fault, _placed(KINDS["groups"], 3, 0), "")
    with pytest.raises(AssertionError):
        check_exported(in_ranks(3, _export, job))
    (right,) = (one for one in fault.__mro__ if one in (Zero1, Zero3))
    check_exported(in_ranks(3, _export, replace(job, kind=right)))
