"""DeepSpeed's checkpoints and read-outs: native on as many ranks, universal on others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from slices import WHOLE, sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.deepspeed.options import ReadOutKind, stored_as
from zerocheck.case.schema import Case, Precision, Sharding, Training, TrainingSegment
from zerocheck.catalogue import OF_EXTRAS
from zerocheck.contract import Implementation, loading
from zerocheck.drive.checkpoints import Position
from zerocheck.errors import CheckpointError
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import Obligation
from zerocheck.ranks.pool import Pool

from ..driver import in_ranks, step_of
from ..holding import holds
from .deepspeed_cases import EVERYTHING, chosen, needs_deepspeed

RESUMED: tuple[Obligation, ...] = ("roundtrip", "export", "continuation")
READ_OUTS: tuple[ReadOutKind, ...] = ("functions", "state-dict", "zero-to-fp32")
ALL = ("deepspeed1", "deepspeed2", "deepspeed3")


def _resumed(name: str, saving: int, *loading_on: int, **options: Any) -> Case:
    case = chosen(name, saving)
    segments = tuple(TrainingSegment(mesh=(size,)) for size in loading_on)
    both = {**case.options, **stored_as(options)}
    return msgspec.structs.replace(case, resume=segments, options=both)


def _holds(pool: Pool, name: str, case: Case) -> None:
    statuses = holds(pool, name, case, RESUMED).statuses
    assert all(statuses[one] == "holds" for one in RESUMED)


NATIVE = sliced(
    [(name, case) for name in OF_EXTRAS for case in ("tied", "mixed", "microbatches", "restore")],
    [(name, "tied" if name == "deepspeed1" else "mixed") for name in OF_EXTRAS],
)


@pytest.mark.every(4)
@needs_deepspeed
@pytest.mark.parametrize(("name", "case"), NATIVE)
def test_its_own_checkpoint_on_as_many_ranks(pool: Pool, name: str, case: str) -> None:
    for kind in READ_OUTS if WHOLE else READ_OUTS[:1]:
        _holds(pool, name, _resumed(case, 2, 2, round_robin_gradients=False, read_out=kind))


@pytest.mark.long
@pytest.mark.every(4)
@needs_deepspeed
@pytest.mark.parametrize("name", OF_EXTRAS)
def test_checkpoints_of_masters(pool: Pool, name: str) -> None:
    """Universal ones on other ranks, where there are any; a state dict is of what is narrow."""
    precision = Precision(compute="bf16", reduce="bf16")
    kinds = READ_OUTS if WHOLE else (READ_OUTS[1 if name == "deepspeed3" else 0],)
    for kind in kinds:
        case = _resumed("tied", 2, 3, universal=True, read_out=kind)
        _holds(pool, name, msgspec.structs.replace(case, precision=precision))


@needs_deepspeed
def test_stage_0_on_other_ranks(pool: Pool) -> None:
    _holds(pool, "deepspeed0", _resumed("groups", 2, 3))


@needs_deepspeed
@pytest.mark.parametrize("name", sliced(ALL, ("deepspeed2", "deepspeed3")))
@pytest.mark.parametrize("sizes", sliced(((2, 3), (3, 1), (1, 2, 3)), ((1, 2, 3),)))
def test_a_universal_checkpoint_on_other_ranks(
    pool: Pool, name: str, sizes: tuple[int, ...]
) -> None:
    _holds(pool, name, _resumed("tied", *sizes, universal=True, read_out="zero-to-fp32"))


@needs_deepspeed
@pytest.mark.parametrize("name", ALL)
def test_its_own_checkpoint_is_refused_on_other_ranks(name: str) -> None:
    kind = loading.load(name)
    reason = kind.supports(_resumed("tied", 2, 3))
    assert reason is not None and "as many ranks as wrote it" in reason
    assert kind.supports(_resumed("tied", 2, 2)) is None
    assert kind.supports(_resumed("tied", 2, 3, universal=True)) is None


def _refused(mesh: DeviceMesh, kind: type[Implementation], case: Case, folder: str) -> str:
    subject = kind(build_model(case), case, mesh)
    try:
        subject.load(folder, Position(0))
    except CheckpointError as error:
        return str(error)
    finally:
        subject.close()
    return ""


@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize(
    ("universal", "message"), [(False, "found no checkpoint"), (True, "ds_to_universal failed")]
)
def test_a_directory_without_a_checkpoint_is_refused(
    tmp_path: Path, universal: bool, message: str
) -> None:
    """On every rank; DeepSpeed alone only warns."""
    case = Case(mesh=(2,), options=stored_as({"universal": universal}))
    ranks = in_ranks(2, _refused, loading.load("deepspeed2"), case, str(tmp_path))
    assert all(message in one for one in ranks), ranks


def _gradients(
    mesh: DeviceMesh, kind: type[Implementation], case: Case
) -> list[tuple[str, Any, torch.Tensor, torch.Tensor]]:
    """What safe_get_full_grad gives before the update, beside the local partitions."""
    from deepspeed.utils import safe_get_full_grad

    model = build_model(case)
    named: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    subject = kind(model, case, mesh)
    found = []

    def reached(_: object) -> None:
        whole = {
            name: safe_get_full_grad(parameter).reshape(-1)
            for name, parameter in named.items()
            if parameter.requires_grad
        }
        for shard in subject.shards():
            if shard.role == "gradient" and shard.tensor is not None:
                place = slice(None) if shard.index is None else shard.index
                own = shard.tensor.detach().reshape(-1).clone()
                found.append((shard.name, place, own, whole[shard.name][place].clone()))

    subject.train_step(step_of(case, 0, dist.get_rank(), reached))
    subject.close()
    return found


@pytest.mark.long
@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("name", sliced(ALL, ("deepspeed1", "deepspeed3")))
def test_safe_get_full_grad_is_what_the_partitions_hold(name: str) -> None:
    case = msgspec.structs.replace(
        EVERYTHING, training=Training(microbatches=3), sharding=Sharding(bucket=40), options={}
    )
    ranks = in_ranks(3, _gradients, loading.load(name), case)
    assert sum(len(rank) for rank in ranks) >= 10
    for rank in ranks:
        for shard, _, own, whole in rank:
            assert torch.equal(own, whole), shard
            assert bool((own != 0).any()) or own.numel() < 3
