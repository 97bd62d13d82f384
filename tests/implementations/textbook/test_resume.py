"""A checkpoint of any stage on N ranks loads into any stage on M, bit for bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Training
from zerocheck.implementations.textbook.checkpoint.resumable import Resumable
from zerocheck.implementations.textbook.zero2 import Zero2
from zerocheck.implementations.textbook.zero3 import Zero3

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
from .resuming import (
    Data as Samples,
)

WORLDS = ((2, 3), (3, 2), (1, 5), (5, 1), (3, 3), (2, 13), (11, 7))


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


def _jobs(folder: Path, world_size: int, writer: int, reader: int | None = None) -> list[Job]:
    """All kinds of cases, as `writer` saves them, or as `reader` loads them."""
    stage = writer if reader is None else reader
    return [
        Job(STAGES[stage], _placed(case, world_size, stage), str(folder / f"{name}{writer}"))
        for name, case in KINDS.items()
    ]


@pytest.mark.parametrize(("n", "m"), WORLDS)
def test_any_stage_into_any_other(tmp_path: Path, n: int, m: int) -> None:
    large = max(n, m) > 5
    pairs = [(0, 2), (2, 1), (1, 0)] if large else [(i, j) for i in range(3) for j in range(3)]
    writers = sorted({i for i, _ in pairs})
    saved = in_ranks(n, save_all, [job for i in writers for job in _jobs(tmp_path, n, i)])
    loaded = in_ranks(m, load_all, [job for i, j in pairs for job in _jobs(tmp_path, m, i, j)])
    of = {i: k * len(KINDS) for k, i in enumerate(writers)}
    for number, (i, _) in enumerate(pairs):
        for kind in range(len(KINDS)):
            before = [rank[of[i] + kind] for rank in saved]
            after = [rank[number * len(KINDS) + kind] for rank in loaded]
            check_equal(before, after)
            check_exported(before)
            check_exported(after)


def _continued(mesh: DeviceMesh, job: Job, twin: Job) -> tuple[Held, Held]:
    """One more step after the checkpoint, and after loading it on the same ranks."""
    sharder = trained(mesh, job)
    sharder.save(job.directory, Samples(3))
    fresh = twin.kind(scrambled(twin.case), twin.case, mesh)
    fresh.load(job.directory, Samples(0))
    seen = []
    for one in (sharder, fresh):
        one.train_step(step_of(job.case, job.case.training.steps, mesh.get_rank(), lambda _: None))
        torch.manual_seed(1)
        seen.append(held(one, Samples(3)))
        one.close()
    return seen[0], seen[1]


@pytest.mark.parametrize("kind", ["groups", "unfrozen", "buffers", "shapes"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_step_is_the_same(tmp_path: Path, stage: type[Resumable], kind: str) -> None:
    job = Job(stage, _placed(KINDS[kind], 2, 0), str(tmp_path))
    check_equal(*map(list, zip(*in_ranks(2, _continued, job, job), strict=True)))


class _InBackground2(Zero2):
    background = True


class _InBackground3(Zero3):
    background = True


class _WithoutCopy(_InBackground3):
    def snapshot(self, chunks):  # type: ignore[no-untyped-def]
        return list(chunks)


def _meanwhile(mesh: DeviceMesh, job: Job) -> list[Held]:
    """Save in the background, and train while it is written, which waits for the training."""
    sharder = trained(mesh, job)
    seen = held(sharder, Samples(3))
    group = sharder.group_of_saving()
    begin = sharder.start_saving
    steps: list[object] = []

    def late(write):  # type: ignore[no-untyped-def]
        def wait_and_write() -> None:
            while not steps:
                pass
            write()

        return begin(wait_and_write)

    sharder.start_saving = late  # type: ignore[method-assign]
    saving = sharder.save(job.directory, Samples(3))
    assert saving is not None
    steps.append(sharder.train_step(step_of(job.case, 2, mesh.get_rank(), lambda _: None)))
    saving.result()
    assert sharder.save(job.directory, Samples(3)) is not None
    assert sharder.group_of_saving() is group
    sharder.close()
    return [seen]


@pytest.mark.parametrize("kind", [_InBackground2, _InBackground3])
def test_training_goes_on_while_it_is_written(tmp_path: Path, kind: type[Resumable]) -> None:
    job = Job(kind, _placed(KINDS["buffers"], 2, 0), str(tmp_path))
    _ = in_ranks(2, _meanwhile, job)
