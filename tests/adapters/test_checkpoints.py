"""Checkpoints of torch's own implementations: saved on N ranks, loaded on M, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1GradOp, Fsdp1NoShard
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.zero_redundancy.adapter import ZeroRedundancy
from zerocheck.case.schema import Block, Case, CheckpointKind, Model, Training, TrainingSegment
from zerocheck.contract import Built, Implementation, groups
from zerocheck.contract.build import BuiltImplementation, from_function
from zerocheck.contract.checkpoint import _groups
from zerocheck.contract.start import initial_state, scramble
from zerocheck.drive.checkpoints import Position
from zerocheck.errors import Unsupported
from zerocheck.models.network import build_model

from .cases import CASES, GROUPS, MLP, on
from .driver import View, assembled, copied, in_ranks, step_of

Kind = type[Implementation]
Job = tuple[Kind, Case]
Whole = dict[tuple[str, str], torch.Tensor]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MANY: list[tuple[Kind, CheckpointKind, str]] = [
    (Ddp, "distributed", "block"),
    (Ddp, "full", "views"),
    (ZeroRedundancy, "distributed", "views"),
    (Fsdp1, "distributed", "flat"),
    (Fsdp1, "full", "layer"),
    (Fsdp1, "sharded", "flat"),
    (Fsdp1GradOp, "distributed", "block"),
    (Fsdp1GradOp, "full", "flat"),
    (Fsdp1NoShard, "distributed", "block"),
    (Fsdp1NoShard, "sharded", "flat"),
    (Fsdp2, "distributed", "layer"),
    (Fsdp2, "full", "block"),
]
"""Implementation, `sharding.checkpoint`, and a name of SHARDINGS."""

BF16 = Case(
    seed=5,
    model=Model(
        inputs=7,
        width=5,
        blocks=(Block(kind="mlp", hidden=5, dtype="bf16"), Block(kind="mlp", hidden=3)),
        outputs=1,
    ),
)
"""Two dtypes, and a bias of one element, of which most ranks have nothing."""


def _trained(mesh: DeviceMesh, kind: Kind, case: Case, steps: int | None = None) -> Any:
    model = build_model(case)
    state = initial_state(case, model)
    subject = kind(model, case, mesh)
    if state is not None:
        subject.restore(state)
    for index in range(case.training.steps if steps is None else steps):
        subject.train_step(step_of(case, index, dist.get_rank(), lambda _: None))
    return subject


def _loaded(mesh: DeviceMesh, kind: Kind, case: Case, folder: str) -> tuple[Any, int]:
    model = build_model(case)
    scramble(model, case)
    subject = kind(model, case, mesh)
    position = Position(0)
    subject.load(folder, position)
    return subject, position.samples


def _save_all(
    mesh: DeviceMesh, jobs: list[Job], folder: str
) -> list[tuple[list[View], Whole, torch.Tensor] | str]:
    seen: list[tuple[list[View], Whole, torch.Tensor] | str] = []
    for number, (kind, case) in enumerate(jobs):
        reason = kind.supports(case)
        if reason is not None:
            seen.append(reason)
            continue
        subject = _trained(mesh, kind, case)
        exported = {key: tensor.clone() for key, tensor in subject.export().items()}
        torch.manual_seed(dist.get_rank())
        assert subject.save(f"{folder}/{number}", Position(40 + number)) is None
        seen.append((copied(subject), exported, torch.get_rng_state()))
        subject.close()
    return seen


def _load_all(
    mesh: DeviceMesh, jobs: list[Job], folder: str
) -> list[tuple[list[View], int, torch.Tensor] | str]:
    seen: list[tuple[list[View], int, torch.Tensor] | str] = []
    for number, (kind, case) in enumerate(jobs):
        reason = kind.supports(case)
        if reason is not None:
            seen.append(reason)
            continue
        torch.manual_seed(99)
        subject, samples = _loaded(mesh, kind, case, f"{folder}/{number}")
        seen.append((copied(subject), samples, torch.get_rng_state()))
        subject.close()
    return seen


def _whole(views: list[list[View]]) -> Whole:
    """All roles but gradients, put together; buffers are those of rank 0."""
    found: Whole = {}
    for role in ("parameter", *MOMENTS):
        for name, tensor in assembled(views, role).items():
            assert tensor is not None
            found[name, role] = tensor
    for name, role, tensor, _, _ in (view for rank in reversed(views) for view in rank):
        if role in ("step", "buffer"):
            assert tensor is not None
            found[name, role] = tensor
    return found


def _differences(saved: Whole, other: Whole) -> list[str]:
    wrong = [f"{key} lost" for key in saved if key not in other]
    wrong += [f"{key} invented" for key in other if key not in saved]
    for key, tensor in saved.items():
        # What was put together is in fp32; that keeps the bits of bf16.
        if key in other and not torch.equal(tensor.float(), other[key].float()):
            wrong.append(f"{key} differs")
    return wrong


def _on(jobs: list[Job], world_size: int) -> list[Job]:
    return [(kind, msgspec.structs.replace(case, mesh=(world_size,))) for kind, case in jobs]


def _check(saving: int, loading: int, jobs: list[Job], folder: Path) -> int:
    """Save all, load all, compare; the number of jobs that were not refused."""
    kept = in_ranks(saving, _save_all, _on(jobs, saving), str(folder))
    found = in_ranks(loading, _load_all, _on(jobs, loading), str(folder))
    wrong: list[str] = []
    checked = 0
    for number, (kind, case) in enumerate(jobs):
        before = [rank[number] for rank in kept]
        after = [rank[number] for rank in found]
        if isinstance(before[0], str) or isinstance(after[0], str):
            continue
        checked += 1
        saved = _whole([views for views, _, _ in before])
        which = f"{kind.__name__}, {case.sharding.checkpoint}, {number}"
        message = _differences(saved, _whole([views for views, _, _ in after]))
        for rank, (_, exported, _) in enumerate(before):
            if exported or rank == 0:
                message += [f"export: {one}" for one in _differences(saved, exported)]
        if {samples for _, samples, _ in after} != {40 + number}:
            message.append("the position of the loader is lost")
        again = [torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=False)]
        if any(again) != (saving == loading) or len(set(again)) > 1:
            message.append(f"random states are back on the ranks {again}")
        wrong += [f"{which}: {one}" for one in message]
    assert not wrong, "\n".join(wrong)
    return checked


def _jobs(*names: str) -> list[Job]:
    return [
        (kind, _kept_as(on(CASES[name], 2, sharding), way))
        for kind, way, sharding in MANY
        for name in names
    ]


def _kept_as(case: Case, way: CheckpointKind) -> Case:
    sharding = msgspec.structs.replace(case.sharding, checkpoint=way)
    return msgspec.structs.replace(case, sharding=sharding)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("saving", "loading", "names"),
    [
        (2, 3, sliced(("amsgrad", "tied"), ("amsgrad",))),
        *sliced(
            [
                (3, 1, ("experts",)),
                (1, 2, ("mixed",)),
                (3, 2, ("frozen", "shapes")),
                (2, 2, ("restore_fused",)),
                (2, 5, ("plain",)),
            ],
            [(3, 2, ("frozen",))],
        ),
    ],
)
def test_round_trip(saving: int, loading: int, names: tuple[str, ...], tmp_path: Path) -> None:
    assert _check(saving, loading, _jobs(*names), tmp_path) >= 6


@pytest.mark.long
def test_a_parameter_that_never_had_a_gradient_gets_no_state(tmp_path: Path) -> None:
    # torch invents one for whole state dicts of FSDP2: reports/findings.
    jobs = [
        job for job in _jobs("unused") if (job[0], job[1].sharding.checkpoint) != (Fsdp2, "full")
    ]
    assert _check(2, 3, jobs, tmp_path) == len(jobs)


@pytest.mark.long
def test_two_dtypes_and_fewer_rows_than_ranks(tmp_path: Path) -> None:
    jobs = [(kind, _kept_as(BF16, way)) for kind, way, _ in MANY if kind is not ZeroRedundancy]
    assert _check(2, 3, jobs, tmp_path) == len(jobs)


def _loads_transposed(mesh: DeviceMesh, case: Case, folder: str) -> str:
    try:
        _loaded(mesh, Fsdp1, case, folder)
    except Unsupported as refusal:
        return str(refusal)
    return ""


def test_what_torch_refuses_to_shard_is_refused_by_the_load_too(tmp_path: Path) -> None:
    # One rank saves whole tensors in their own layout; several make ShardedTensors of them.
    case = Case(model=Model(blocks=(Block(kind="mlp", transposed=True),)), mesh=(1,))
    case = _kept_as(case, "sharded")
    in_ranks(1, _over_older, [(Fsdp1, case)], str(tmp_path))
    case = msgspec.structs.replace(case, mesh=(2,))
    for message in in_ranks(2, _loads_transposed, case, str(tmp_path / "0")):
        assert "Only torch.contiguous_format memory_format" in message


def test_the_comparison_sees_a_load_that_forgets(tmp_path: Path) -> None:
    def load(self: BuiltImplementation, directory: str, loader: Any) -> None:
        BuiltImplementation.load(self, directory, loader)
        state = self.built.optimizer.state
        next(iter(state.values()))["exp_avg"].zero_()

    broken = type("Broken", (Ddp,), {"load": load})
    with pytest.raises(AssertionError, match=r"exp_avg.*differs"):
        _check(2, 2, [(broken, on(CASES["plain"], 2, "block"))], tmp_path)


def _user_fsdp2(model: Any, case: Case, mesh: DeviceMesh) -> Built:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Built(model, torch.optim.AdamW(groups(model, case)))


def test_what_looks_like_torch_needs_to_write_nothing(tmp_path: Path) -> None:
    assert _check(3, 2, [(from_function(_user_fsdp2), CASES["plain"])], tmp_path) == 1


def test_states_that_torch_does_not_see_are_refused() -> None:
    subject = object.__new__(BuiltImplementation)
    model = torch.nn.Linear(1, 1)
    subject.built = Built(model, torch.optim.AdamW(model.parameters()), states=dict)
    for call in (subject.save, subject.load):
        with pytest.raises(Unsupported, match=r"Built\.states"):
            call("", Position(0))
    with pytest.raises(Unsupported, match=r"Built\.states"):
        subject.export()


def _in_background(mesh: DeviceMesh, jobs: list[Job], folder: str) -> list[list[View]]:
    seen = []
    for number, (kind, case) in enumerate(jobs):
        subject = _trained(mesh, kind, case, steps=1)
        # The older checkpoint is there, and is written over.
        saving = subject.save(f"{folder}/{number}", Position(1))
        saving.result()
        subject.train_step(step_of(case, 1, dist.get_rank(), lambda _: None))
        held = copied(subject)
        saving = subject.save(f"{folder}/{number}", Position(2))
        subject.train_step(step_of(case, 2, dist.get_rank(), lambda _: None))
        saving.result()
        seen.append(held)
        subject.close()
    assert len(_groups) == 1, "a process group for each checkpoint"
    return seen


@pytest.mark.long
def test_in_the_background_the_state_of_the_call_is_written(tmp_path: Path) -> None:
    case = msgspec.structs.replace(
        on(CASES["plain"], 3, "block"), resume=(TrainingSegment(mesh=(2,), background=True),)
    )
    jobs: list[Job] = [(kind, case) for kind in (Ddp, Fsdp1, Fsdp1NoShard, Fsdp2)]
    kept = in_ranks(3, _in_background, jobs, str(tmp_path))
    # The files of the third rank are left there by the ranks before.
    found = in_ranks(2, _load_all, _on(jobs, 2), str(tmp_path))
    for number in range(len(jobs)):
        saved = _whole([rank[number] for rank in kept])
        assert not _differences(saved, _whole([rank[number][0] for rank in found]))
        assert {rank[number][1] for rank in found} == {2}


def _scale(mesh: DeviceMesh, jobs: list[Job], folder: str) -> list[float]:
    scales = []
    for number, (kind, case) in enumerate(jobs):
        subject = _trained(mesh, kind, case)
        subject.built.scaler.update(512.0)
        subject.save(f"{folder}/{number}", Position(1))
        subject, _ = _loaded(mesh, kind, case, f"{folder}/{number}")
        scales.append(subject.built.scaler.get_scale())
        report = subject.train_step(step_of(case, 1, dist.get_rank(), lambda _: None))
        scales.append(report.loss_scale)
        subject.close()
    return scales


@pytest.mark.long
def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    case = Case(seed=5, model=MLP, training=Training(steps=1, loss_scale=1024.0))
    jobs: list[Job] = [(kind, _kept_as(case, way)) for kind, way, _ in MANY]
    for scales in in_ranks(2, _scale, jobs, str(tmp_path)):
        assert set(scales) == {512.0}


def _over_older(mesh: DeviceMesh, jobs: list[Job], folder: str) -> None:
    for number, (kind, case) in enumerate(jobs):
        subject = _trained(mesh, kind, case, steps=1)
        subject.save(f"{folder}/{number}", Position(1))
        subject.close()


@pytest.mark.long
def test_a_checkpoint_of_more_ranks_is_replaced(tmp_path: Path) -> None:
    jobs = _jobs("groups")
    jobs = [job for job in jobs if job[0].supports(job[1]) is None]
    in_ranks(3, _over_older, _on(jobs, 3), str(tmp_path))
    assert _check(2, 2, jobs, tmp_path) == len(jobs)


def _without(mesh: DeviceMesh, jobs: list[Job], folder: str) -> list[str]:
    message = []
    for kind, case in jobs:
        try:
            _loaded(mesh, kind, case, folder)
        except Exception as error:
            message.append(str(error))
    return message


def test_a_load_without_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    jobs = _jobs("plain")
    for message in in_ranks(2, _without, jobs, str(tmp_path)):
        assert len(message) == len(jobs)
        assert all(".metadata" in one or "checkpoint.pt" in one for one in message)


def _unwritable(mesh: DeviceMesh, jobs: list[Job], folder: str) -> list[str]:
    message = []
    for kind, case in jobs:
        subject = _trained(mesh, kind, case, steps=1)
        try:
            subject.save(folder, Position(0))
        except RuntimeError as error:
            message.append(str(error))
        subject.close()
    return message


def test_all_ranks_learn_that_rank_0_could_not_write(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    jobs = [job for job in _jobs("plain") if job[0] in (Ddp, ZeroRedundancy)]
    jobs = [job for job in jobs if job[0] is ZeroRedundancy or job[1].sharding.checkpoint == "full"]
    for message in in_ranks(2, _unwritable, jobs, str(file)):
        assert len(message) == len(jobs) == 2
        assert all("rank 0 could not write the checkpoint: FileExists" in one for one in message)


@pytest.mark.long
def test_groups_are_what_the_case_says_after_a_load(tmp_path: Path) -> None:
    jobs = [job for job in _jobs("groups") if job[0].supports(job[1]) is None]
    kept = in_ranks(2, _over_older, jobs, str(tmp_path))
    assert kept == [None, None]
    for options in in_ranks(3, _options, _on(jobs, 3), str(tmp_path)):
        for groups_ in options:
            assert [(tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in groups_] == [
                ((g.beta1, g.beta2), g.eps, g.weight_decay) for g in GROUPS
            ]


def _options(mesh: DeviceMesh, jobs: list[Job], folder: str) -> list[list[dict[str, Any]]]:
    seen = []
    for number, (kind, case) in enumerate(jobs):
        subject, _ = _loaded(mesh, kind, case, f"{folder}/{number}")
        owner = getattr(subject.built.optimizer, "optim", subject.built.optimizer)
        seen.append(
            [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]
        )
        subject.close()
    return seen
