"""A checkpoint of any stage on N ranks loads into any stage on M, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.textbook.checkpoint.chunk import Chunk
from zerocheck.adapters.textbook.checkpoint.directory import Writer
from zerocheck.adapters.textbook.checkpoint.resumable import Resumable
from zerocheck.adapters.textbook.checkpoint.transfer import find_verified, read, write
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Training, TrainingSegment
from zerocheck.contract.implementation import Saving
from zerocheck.drive.checkpoints import Position
from zerocheck.errors import CheckpointError
from zerocheck.models.network import build_model

from ..cases import FROZEN, GROUPS, MIXED, SHAPES, SHARDINGS, TIED
from ..driver import in_ranks, step_of
from .resuming import (
    STAGES,
    Held,
    Job,
    check_equal,
    check_exported,
    held,
    load_all,
    save_all,
    scrambled,
    trained,
)

ALL = tuple((i, j) for i in range(3) for j in range(3))
ROUND = ((0, 2), (2, 1), (1, 0))
FEW = ("groups", "buffers", "shapes")


def _case(model: Model, **given: object) -> Case:
    given.setdefault("training", Training(steps=2))
    return Case(seed=5, model=model, data=Data(batch=2, length=3), **given)  # type: ignore[arg-type]


SCALED = Training(steps=2, loss_scale=1024.0, overflow=1)
KINDS = {
    "groups": _case(
        TIED, optimizer=Optimizer(groups=GROUPS, amsgrad=True, schedule="warmup"), training=SCALED
    ),
    "buffers": _case(MIXED),
    "shapes": _case(
        msgspec.structs.replace(SHAPES, frozen=("blocks.0.*",)), optimizer=Optimizer(kernel="fused")
    ),
    "unfrozen": _case(FROZEN, training=Training(steps=3, unfreeze=1)),
    "frozen": _case(FROZEN),
    "bf16": _case(
        Model(
            inputs=7,
            width=6,
            blocks=(Block(kind="mlp", hidden=5, dtype="bf16"), Block(kind="mlp", hidden=3)),
            outputs=3,
        )
    ),
    "never_stepped": _case(FROZEN, training=Training(steps=1, loss_scale=4.0, overflow=0)),
    "unused": _case(msgspec.structs.replace(FROZEN, unused=True, frozen=("*",))),
}
"""Frozen, tied, uneven, 0-d, empty and transposed parameters, buffers, groups, loss scales."""


def _placed(case: Case, world_size: int, stage: int) -> Case:
    """The case on so many ranks, with another sharding for every stage and number."""
    names = ("layer", "whole", "block_kept", "size")
    sharding = SHARDINGS[names[(world_size + stage) % len(names)]]
    return msgspec.structs.replace(case, mesh=(world_size,), sharding=sharding)


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("n", "m", "pairs", "kinds"),
    [
        (2, 3, sliced(ALL, ROUND), FEW),
        (3, 3, ROUND, sliced(tuple(KINDS), tuple(KINDS)[::3])),
        (5, 1, ROUND, FEW[:2]),
        *sliced(
            [
                (3, 2, ROUND, FEW[:2]),
                (1, 5, ROUND, FEW[:2]),
                (2, 13, ROUND, FEW[:1]),
                (11, 7, ROUND, FEW[:1]),
            ],
            [(1, 5, ROUND, FEW[:1])],
        ),
    ],
)
def test_any_stage_into_any_other(
    tmp_path: Path, n: int, m: int, pairs: tuple[tuple[int, int], ...], kinds: tuple[str, ...]
) -> None:
    """Stage i on n ranks saves, stage j on m ranks loads."""

    def job(kind: str, world_size: int, writer: int, stage: int) -> Job:
        case = _placed(KINDS[kind], world_size, stage)
        return Job(STAGES[stage], case, str(tmp_path / f"{kind}{writer}"))

    written = [(kind, i) for i in sorted({i for i, _ in pairs}) for kind in kinds]
    read = [(kind, i, j) for i, j in pairs for kind in kinds]
    saved = in_ranks(n, save_all, [job(kind, n, i, i) for kind, i in written])
    loaded = in_ranks(m, load_all, [job(kind, m, i, j) for kind, i, j in read])
    before = {key: [rank[k] for rank in saved] for k, key in enumerate(written)}
    for one in before.values():
        check_exported(one)
    for k, (kind, i, _) in enumerate(read):
        check_equal(before[kind, i], [rank[k] for rank in loaded])


def _continued(mesh: DeviceMesh, job: Job, replica: Job) -> tuple[Held, Held]:
    """One more step after the checkpoint, and after loading it on the same ranks."""
    sharder = trained(mesh, job)
    sharder.save(job.directory, Position(3))
    fresh = replica.kind(scrambled(replica.case), replica.case, mesh)
    fresh.load(job.directory, Position(0))
    seen = []
    for one in (sharder, fresh):
        one.train_step(step_of(job.case, job.case.training.steps, mesh.get_rank(), lambda _: None))
        torch.manual_seed(1)
        seen.append(held(one, Position(3)))
        one.close()
    return seen[0], seen[1]


@pytest.mark.every(6)
@pytest.mark.parametrize("kind", ["groups", "unfrozen", "buffers", "shapes"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_step_is_the_same(tmp_path: Path, stage: type[Resumable], kind: str) -> None:
    job = Job(stage, _placed(KINDS[kind], 2, 0), str(tmp_path))
    check_equal(*map(list, zip(*in_ranks(2, _continued, job, job), strict=True)))


class _WithoutCopy(Zero3):
    """What is written is what the training makes of it meanwhile."""

    def snapshot(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        return list(chunks)


def _meanwhile(mesh: DeviceMesh, job: Job) -> Held:
    """Save in the background. Nothing is written before one more step was taken."""
    sharder = trained(mesh, job)
    seen = held(sharder, Position(3))
    stepped = Event()
    start = sharder.start_saving

    def start_late(write: Callable[[], None]) -> Saving:
        return start(lambda: (stepped.wait(), write())[1])

    sharder.start_saving = start_late  # type: ignore[method-assign]
    saving = sharder.save(job.directory, Position(3))
    assert saving is not None
    sharder.train_step(step_of(job.case, 2, mesh.get_rank(), lambda _: None))
    stepped.set()
    saving.result()
    sharder.close()
    return seen


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [Zero2, Zero3, _WithoutCopy])
def test_training_goes_on_while_it_is_written(tmp_path: Path, kind: type[Resumable]) -> None:
    case = msgspec.structs.replace(KINDS["buffers"], resume=(TrainingSegment(background=True),))
    job = Job(kind, _placed(case, 2, 0), str(tmp_path))
    saved = in_ranks(2, _meanwhile, job)
    loaded = [one[0] for one in in_ranks(3, load_all, [_on(job, 3)])]
    if kind is _WithoutCopy:
        with pytest.raises(AssertionError):
            check_equal(saved, loaded)
    else:
        check_equal(saved, loaded)


def _on(job: Job, world_size: int) -> Job:
    return Job(job.kind, _placed(job.case, world_size, 1), job.directory)


def _refused(mesh: DeviceMesh, job: Job) -> str:
    sharder = job.kind(build_model(job.case), job.case, mesh)
    with pytest.raises(CheckpointError) as error:
        sharder.load(job.directory, Position(0))
    sharder.close()
    return str(error.value)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (_case(msgspec.structs.replace(MIXED, outputs=3)), "head.weight is torch.float32 [2, 6]"),
        (_case(msgspec.structs.replace(MIXED, head_bias=False)), "this one has no head.bias"),
        (_case(msgspec.structs.replace(MIXED, unused=True)), "it has no spare.up.weight"),
        (_case(MIXED, optimizer=Optimizer(groups=GROUPS)), "1 parameter groups, the optimizer 3"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: Case, words: str) -> None:
    in_ranks(2, save_all, [Job(Zero1, _placed(KINDS["buffers"], 2, 0), str(tmp_path))])
    answer = in_ranks(2, _refused, Job(Zero3, _placed(other, 2, 1), str(tmp_path)))
    assert answer[0] == answer[1] and words in answer[0]


def _gap(mesh: DeviceMesh, directory: str, kept: int, dtype: torch.dtype) -> str:
    """Write a part of a tensor, and ask for all of it."""
    group = mesh.get_group()
    half = Chunk("model.half", torch.arange(4.0)[:kept], 0, 4)
    write(Writer(directory), [half], b"{}", group)
    found = find_verified(directory, group)
    wanted = Chunk("model.half", torch.zeros(4, dtype=dtype), 0, 4)
    with pytest.raises(CheckpointError) as error:
        read(found, [wanted], group)
    return str(error.value)


def test_a_gap_and_another_dtype_are_refused(tmp_path: Path) -> None:
    """torch would leave the memory as it was, and cast."""
    (answer,) = in_ranks(1, _gap, str(tmp_path), 3, torch.float32)
    assert "only a part of model.half" in answer
    (answer,) = in_ranks(1, _gap, str(tmp_path), 4, torch.bfloat16)
    assert "model.half is" in answer and "torch.bfloat16" in answer
