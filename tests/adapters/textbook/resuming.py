"""Saves on so many ranks, loads on so many others, and says what each rank held."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.textbook.checkpoint.resumable import Resumable
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Case
from zerocheck.case.shapes import unfrozen
from zerocheck.drive.checkpoints import Position
from zerocheck.models.network import build_model

from ..driver import View, assembled, copied, step_of

STAGES: tuple[type[Resumable], ...] = (Zero1, Zero2, Zero3)
STATE = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


@dataclass
class Held:
    """What one rank held: copies of its shards, what it exports, and all that is no tensor."""

    views: list[View]
    exported: dict[tuple[str, str], torch.Tensor]
    random: torch.Tensor
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A stage, a case, where its checkpoint is."""

    kind: type[Resumable]
    case: Case
    directory: str


def held(sharder: Resumable, data: Position, *, export: bool = True) -> Held:
    views = [view for view in copied(sharder) if view[1] not in ("gradient", "padding")]
    rest = {
        "scaler": sharder.scaler.state_dict(),
        "samples": data.samples,
        "trains": [name for name, one in sharder.model.named_parameters() if one.requires_grad],
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in sharder.optimizer.optimizer.param_groups
        ],
    }
    random = torch.get_rng_state()
    return Held(views, dict(sharder.export()) if export else {}, random, rest)


def trained(mesh: DeviceMesh, job: Job) -> Resumable:
    """A sharder after the steps of its case, with different random states on every rank."""
    sharder = job.kind(build_model(job.case), job.case, mesh)
    for index in range(job.case.training.steps):
        step = step_of(job.case, index, dist.get_rank(), lambda _: None)
        names = unfrozen(job.case) if index == job.case.training.unfreeze else ()
        sharder.train_step(replace(step, unfreeze=names))
    torch.manual_seed(1000 + dist.get_rank())
    torch.rand(3)
    return sharder


def scrambled(case: Case) -> nn.Module:
    """The model of a case, with other values."""
    model = build_model(case)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    return model


def save_all(mesh: DeviceMesh, jobs: list[Job]) -> list[Held]:
    """Train and save every job on these ranks; what was held."""
    seen = []
    for number, job in enumerate(jobs):
        sharder = trained(mesh, job)
        data = Position(100 + number)
        seen.append(held(sharder, data))
        sharder.save(job.directory, data)
        again = held(sharder, data, export=False)
        assert all(_same(one, two) for one, two in zip(seen[-1].views, again.views, strict=True))
        sharder.close()
    return seen


def load_all(mesh: DeviceMesh, jobs: list[Job]) -> list[Held]:
    """Load every job into a fresh sharder on a scrambled model; what is held then."""
    seen = []
    for job in jobs:
        sharder = job.kind(scrambled(job.case), job.case, mesh)
        data = Position(0)
        torch.manual_seed(5)
        sharder.load(job.directory, data)
        seen.append(held(sharder, data, export=False))
        sharder.close()
    return seen


def _same(one: View, other: View) -> bool:
    if one[:2] != other[:2] or one[3:] != other[3:]:
        return False
    assert one[2] is not None and other[2] is not None
    return one[2].dtype == other[2].dtype and torch.equal(one[2], other[2])


def state(ranks: list[Held]) -> dict[tuple[str, str], torch.Tensor]:
    """The whole tensors of all ranks, by name and role, but for buffers."""
    return {
        (name, role): tensor
        for role in STATE
        for name, tensor in assembled([one.views for one in ranks], role).items()
        if tensor is not None
    }


def buffers(rank: Held) -> dict[str, torch.Tensor | None]:
    """The buffers of a rank."""
    return {name: tensor for name, role, tensor, *_ in rank.views if role == "buffer"}


def check_equal(saved: list[Held], loaded: list[Held]) -> None:
    """What M ranks hold is what N ranks held, bit for bit."""
    before, after = state(saved), state(loaded)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    for rank, one in enumerate(loaded):
        replica = saved[rank % len(saved)]
        mine, theirs = buffers(one), buffers(replica)
        assert mine.keys() == theirs.keys()
        for name, buffer in mine.items():
            other = theirs[name]
            assert buffer is not None and other is not None
            assert buffer.dtype == other.dtype and torch.equal(buffer, other), name
        for aspect, value in replica.rest.items():
            assert one.rest[aspect] == value, aspect
        same = len(saved) == len(loaded)
        assert torch.equal(one.random, replica.random) is same


def check_exported(ranks: list[Held]) -> None:
    """Every rank exports what the ranks hold."""
    whole = state(ranks)
    for name, buffer in buffers(ranks[0]).items():
        assert buffer is not None
        whole[name, "buffer"] = buffer
    dtypes = {(name, role): t.dtype for name, role, t, *_ in ranks[0].views if t is not None}
    for rank in ranks:
        assert rank.exported.keys() == whole.keys()
        for key, tensor in whole.items():
            exported = rank.exported[key]
            assert exported.shape == tensor.shape and torch.equal(exported.to(tensor.dtype), tensor)
            assert exported.dtype == dtypes.get(key, exported.dtype), key
