"""CPU offload of FSDP1 and FSDP2: what runs without an accelerator, and what torch refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)

from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1GradOp, Fsdp1NoShard
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.case.schema import Case, Sharding, Training
from zerocheck.contract import Implementation
from zerocheck.models.network import build_model

from .cases import CASES
from .driver import in_ranks

FSDP1: list[type[Implementation]] = [Fsdp1, Fsdp1GradOp, Fsdp1NoShard]
none_here = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


def offloading(kind: str, **training: object) -> Case:
    case = replace(CASES["plain"], mesh=(2,), sharding=Sharding(offload=kind))  # type: ignore[arg-type]
    return replace(case, training=Training(**training))  # type: ignore[arg-type]


def _said(mesh: DeviceMesh, wrap: Callable[..., object]) -> str:
    try:
        wrap(nn.Linear(3, 5), mesh=mesh)
    except RuntimeError as error:
        return str(error)
    return ""


def _fsdp1(model: nn.Module, mesh: DeviceMesh) -> None:
    FullyShardedDataParallel(model, device_mesh=mesh, cpu_offload=CPUOffload(offload_params=True))


@none_here
@pytest.mark.parametrize(
    ("kinds", "asked", "wrap"),
    [
        (FSDP1, "pinned", _fsdp1),
        (FSDP1, "pageable", _fsdp1),
        ([Fsdp2], "pinned", partial(fully_shard, offload_policy=CPUOffloadPolicy())),
    ],
)
def test_the_reason_is_torchs_own(
    kinds: list[type[Implementation]], asked: str, wrap: Callable[..., object]
) -> None:
    (message,) = in_ranks(1, _said, wrap)
    assert message
    for kind in kinds:
        assert message.rstrip(".") in (kind.supports(offloading(asked)) or "")


def test_pageable_memory_is_supported() -> None:
    assert Fsdp2.supports(offloading("pageable")) is None


def test_with_an_accelerator_fsdp1_accumulates_under_no_sync_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert Fsdp1.supports(offloading("pinned", microbatches=2)) is None
    assert "pins" in (Fsdp1.supports(offloading("pageable")) or "")
    assert Fsdp2.supports(offloading("pinned")) is None
    case = offloading("pinned", microbatches=2)
    each = replace(case, sharding=replace(case.sharding, sync="each"))
    assert "no_sync" in (Fsdp1.supports(each) or "")
    assert Fsdp1.supports(replace(each, training=Training())) is None


def test_what_is_held_is_told_where_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    case, plain = offloading("pageable"), replace(CASES["plain"], mesh=(2,))
    model = build_model(case)
    with monkeypatch.context() as patched:
        patched.setattr(torch.accelerator, "is_available", lambda: False)
        assert Fsdp2.layout(model, case, 0) == Fsdp2.layout(model, plain, 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    answer = Fsdp2.layout(model, case, 0)
    assert answer is None or not answer.lines
