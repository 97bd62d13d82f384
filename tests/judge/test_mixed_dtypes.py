"""The judge on models with a block in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from zerocheck.case.schema import Block, Case, Model, Start, Training
from zerocheck.protocol.verdicts import EQUIVALENCE

BLOCKS = (
    Block(kind="mlp", hidden=7, dtype="bf16"),
    Block(kind="batch_norm", dtype="bf16"),
    Block(kind="attention", heads=2, residual=True),
)
CASE = Case(
    mesh=(3,),
    seed=5,
    model=Model(inputs=5, width=6, outputs=3, blocks=BLOCKS, frozen=("blocks.0.up.bias",)),
    start=Start(step=2, moments="typical"),
    training=Training(steps=2, microbatches=2, clip=0.01),
)
ONLY = msgspec.structs.replace(
    CASE, model=msgspec.structs.replace(CASE.model, frozen=("stem.*", "head.*", "blocks.2.*"))
)
"""Nothing but bf16 is trained, so torch's norm and coefficient are bf16 too."""

ALL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("case", [CASE, ONLY], ids=["mixed", "narrow-only"])
def test_all_obligations_hold(observe: Callable, implementation: str, case: Case) -> None:
    observed = observe(implementation, case)
    judgement = observed.judge()
    assert judgement.violations == ()
    assert judgement.statuses == dict.fromkeys(EQUIVALENCE, "holds")
    hidden = observed.without_gradients().judge()
    assert hidden.violations == ()
    assert hidden.tier == "state only"


@pytest.mark.every(2)
@pytest.mark.parametrize("implementation", ["ddp", "zero3"])
@pytest.mark.parametrize(
    ("role", "point", "step", "obligation", "ulps"),
    [
        ("gradient", "reduced", 1, "gradient", 16),
        ("gradient", "clipped", 1, "clip", 8),
        ("exp_avg", "state", 1, "update", 8),
        ("exp_avg_sq", "state", 0, "update", 8),
        ("parameter", "state", -1, "publish", 1),
        ("exp_avg", "state", -1, "publish", 1),
        ("buffer", "state", 1, "buffers", 1),
    ],
)
def test_a_few_units_off_in_one_bf16_element_are_seen(
    observe: Callable,
    implementation: str,
    role: str,
    point: str,
    step: int,
    obligation: str,
    ulps: int,
) -> None:
    observed = observe(implementation, CASE)
    narrow = [
        tensor
        for (_, record), tensor in observed.tensors.items()
        if (record.role, record.point, record.step) == (role, point, step)
        and tensor.dtype == torch.bfloat16
    ]
    assert narrow
    for tensor in narrow:
        tensor.view(torch.int16)[tensor.abs().argmax()] += ulps
    assert observed.judge().statuses[obligation] == "violated"


def test_moments_that_are_kept_in_fp32_are_not_blamed(observe: Callable) -> None:
    observed = observe("ddp", CASE)
    records = {
        key: (
            msgspec.structs.replace(key[1], dtype="float32")
            if key[1].role.startswith("exp_avg")
            else key[1]
        )
        for key in observed.tensors
    }
    tensors = {
        (key[0], records[key]): (tensor.float() if key[1].role.startswith("exp_avg") else tensor)
        for key, tensor in observed.tensors.items()
    }
    seen = [
        msgspec.structs.replace(one, records=tuple(records[rank, r] for r in one.records))
        for rank, one in enumerate(observed.seen)
    ]
    assert replace(observed, seen=seen, tensors=tensors).judge().violations == ()
