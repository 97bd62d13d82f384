"""Cases on a GPU: what is right holds, what is planted is caught, what was found is found again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Sharding, Start, Training
from zerocheck.catalogue import BUILT_IN
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.case_file import read
from zerocheck.run.records.records import CaseFile, Outcome

Command = Callable[..., subprocess.CompletedProcess[str]]

BLOCKS = {
    "mlp": (Block(kind="mlp", hidden=33, dropout=0.25),),
    "attention": (Block(kind="attention", heads=2), Block(kind="layer_norm")),
    "conv": (Block(kind="conv"), Block(kind="batch_norm"), Block(kind="group_norm")),
    "recurrent": (Block(kind="recurrent"),),
    "experts": (Block(kind="experts", hidden=16, experts=3),),
    "checkpoint": (Block(kind="mlp", checkpoint=True, dropout=0.1), Block(kind="rms_norm")),
}


def case(blocks: tuple[Block, ...], world_size: int, **training: object) -> Case:
    return Case(
        mesh=(world_size,),
        model=Model(inputs=5, width=8, outputs=3, blocks=blocks),
        data=Data(batch=2, length=3),
        training=Training(steps=2, **training),  # type: ignore[arg-type]
    )


def outcome(pool: Pool, name: str, asked: Case) -> Outcome:
    return Trial(pool, name, asked).outcome(digest=True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_right_holds(pool: Pool, name: str, world_size: int) -> None:
    """One rank is on nccl; several share the GPU, with gloo."""
    judged = 0
    for kind, blocks in BLOCKS.items():
        found = outcome(pool, name, case(blocks, world_size, microbatches=2, clip=0.05))
        if (name, kind) == ("fsdp2", "recurrent"):  # a listed fault of torch
            assert found.judgement is not None
            assert {v.causes for v in (*found.judgement.violations, *found.judgement.further)} == {
                ("module of an earlier step",)
            }
            continue
        assert found.status in ("holds", "unsupported"), (found.reason, found.judgement)
        judged += found.judgement is not None
    assert judged


@pytest.mark.parametrize("kernel", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp2"])
def test_every_kernel_of_adamw_and_a_start_in_mid_training(
    pool: Pool, name: str, kernel: str
) -> None:
    asked = msgspec.structs.replace(
        case(BLOCKS["mlp"], 2),
        optimizer=Optimizer(kernel=kernel, amsgrad=True),  # type: ignore[arg-type]
        start=Start(step=255, moments="typical"),
    )
    found = outcome(pool, name, asked)
    assert found.status == "holds", (found.reason, found.judgement)


def test_random_numbers_are_carried_on_and_scales_halved(pool: Pool) -> None:
    asked = msgspec.structs.replace(
        case(BLOCKS["mlp"], 2, loss_scale=1024.0, overflow=1), data=Data(rng="carried")
    )
    for name in ("ddp", "zero3", "fsdp1"):
        found = outcome(pool, name, asked)
        assert found.status == "holds", (name, found.reason, found.judgement)


OFFLOADING = {
    "fsdp1": ("pinned",),
    "fsdp1-grad-op": ("pinned",),
    "fsdp1-no-shard": ("pinned",),
    "fsdp2": ("pageable", "pinned"),
}


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_shards_lie_on_the_cpu_where_they_are_offloaded(pool: Pool, name: str, kernel: str) -> None:
    """They are read there, restored there, and clipped there."""
    for kind in OFFLOADING[name]:
        asked = msgspec.structs.replace(
            case(BLOCKS["mlp"], 2, microbatches=2, clip=0.05),
            optimizer=Optimizer(kernel=kernel),  # type: ignore[arg-type]
            sharding=Sharding(offload=kind),  # type: ignore[arg-type]
            start=Start(step=255, moments="typical"),
        )
        obligations = (*EQUIVALENCE, "persistent", "release", "communication")
        found = Trial(pool, name, asked, obligations=obligations).outcome()
        assert found.status == "holds", (kind, found.reason, found.judgement)


@pytest.mark.parametrize("fault", ["StaleHostGradient", "CopiedBackBeforeUpdate"])
def test_late_copies_are_caught(pool: Pool, fault: str) -> None:
    asked = msgspec.structs.replace(
        case(BLOCKS["mlp"], 2), sharding=Sharding(offload="pinned"), training=Training(steps=3)
    )
    found = outcome(pool, f"zerocheck.faults.wrapper_options:{fault}", asked)
    assert found.status == "violated", (found.reason, found.judgement)


def test_the_same_bits_in_every_run(pool: Pool) -> None:
    asked = case(BLOCKS["experts"] + BLOCKS["attention"], 2, microbatches=3)
    digests = set()
    for _ in range(3):
        trial = Trial(pool, "zero3", asked, fresh=True)
        judgement = trial.outcome(digest=True).judgement
        assert judgement is not None
        digests.add(judgement.digest)
    assert len(digests) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_drawn_cases_hold(zerocheck: Command, name: str) -> None:
    done = zerocheck("run", name, "--device", "cuda:0", "--max-cases", 24, "--world-sizes", "1,2,4")
    assert done.returncode == 0, done.stdout + done.stderr
    for obligation in EQUIVALENCE:
        assert obligation in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_under_torchrun(zerocheck: Command, ranks: int) -> None:
    given = ("run", "ddp", "zero2", "fsdp2", "--device", "cuda", "--max-cases", 8)
    done = zerocheck(*given, launcher=ranks)
    assert done.returncode == 0, done.stdout + done.stderr


FAULTS = (
    "loss-times-world",
    "last-microbatch-only",
    "local-norm",
    "gather-stale",
    "aligned-walked-unaligned",
    "samples-of-rank0",
    "none-gradient-shifts",
)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(zerocheck: Command, name: str) -> None:
    given = ("faults", name, "--device", "cuda:0", "--world-sizes", "2,3", "--max-cases", 80)
    done = zerocheck(*given)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_finding_says_where_it_was_and_is_found_again(zerocheck: Command, tmp_path: Path) -> None:
    fault = "zerocheck.faults.gradient:LossTimesWorld"
    done = zerocheck("run", fault, "--device", "cuda:0", "--world-sizes", 2, "--max-cases", 4)
    assert done.returncode == 1, done.stdout + done.stderr
    (path, *_) = sorted((tmp_path / "zerocheck-report" / "findings").glob("*.json"))
    file: CaseFile = read(path)
    assert file.environment.device == "cuda"
    assert file.environment.gpu.startswith(torch.cuda.get_device_name(0))
    again = zerocheck("replay", path, "--implementation", fault, "--device", "cuda:0")
    assert again.returncode == 1 and "reproduced bit for bit" in again.stdout, again.stdout
    here = zerocheck("replay", path, "--implementation", fault)
    assert here.returncode == 1 and "it was found on" not in here.stdout
    on_cpu = zerocheck("replay", path, "--implementation", fault, "--device", "cpu")
    assert on_cpu.returncode == 1 and "it was found on cuda" in on_cpu.stdout


def test_a_device_that_is_not_there(zerocheck: Command) -> None:
    done = zerocheck("run", "ddp", "--device", f"cuda:{torch.cuda.device_count()}")
    assert done.returncode == 2 and "this machine has" in done.stderr, done.stderr
