"""The judge on implementations that compute, sum and reduce in other dtypes than fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from slices import sliced

from zerocheck.case.schema import Block, Case, Model, Precision, Sharding, Start, Training
from zerocheck.protocol.verdicts import EQUIVALENCE

BLOCKS = (
    Block(kind="mlp", hidden=7),
    Block(kind="attention", heads=2, residual=True),
    Block(kind="layer_norm"),
)
MODEL = Model(inputs=5, width=6, outputs=3, blocks=BLOCKS, frozen=("blocks.0.up.bias",))
CASE = Case(
    mesh=(3,),
    seed=5,
    model=MODEL,
    start=Start(step=2, moments="typical"),
    training=Training(steps=2, microbatches=2, clip=0.01),
    sharding=Sharding(wrap="layer"),
)
WIDE = Precision(compute="bf16", reduce="fp32")
NARROW = Precision(compute="bf16", reduce="bf16")
REDUCED = Precision(compute="fp32", reduce="bf16")
FP16 = Precision(compute="fp16", reduce="fp16")
ROWS = [
    ("fsdp2", WIDE),
    ("fsdp2", NARROW),
    ("fsdp1", WIDE),
    ("fsdp1-no-shard", REDUCED),
    ("ddp", WIDE),
    ("zero1", WIDE),
    ("zero2", NARROW),
    ("zero3", NARROW),
]


SLICE = sliced(ROWS, [ROWS[0], ROWS[2], ROWS[4], ROWS[6]])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("implementation", "precision"), SLICE, ids=[f"{n}-{p.compute}-{p.reduce}" for n, p in SLICE]
)
def test_all_obligations_hold(observe: Callable, implementation: str, precision: Precision) -> None:
    sharding = replace(CASE.sharding, sync="each" if precision == REDUCED else "last")
    observed = observe(implementation, replace(CASE, precision=precision, sharding=sharding))
    judgement = observed.judge()
    assert judgement.violations == ()
    holds = {name for name, status in judgement.statuses.items() if status == "holds"}
    assert holds == {*EQUIVALENCE} - {"buffers"}
    assert judgement.semantics["reduce"] in (precision.reduce, "own")


@pytest.mark.parametrize(("implementation", "ranks"), [("fsdp1", 1), ("fsdp1-no-shard", 3)])
def test_fsdp1_that_does_not_shard_reduces_its_sum_again(
    observe: Callable, implementation: str, ranks: int
) -> None:
    """With each microbatch the whole sum is cast to bf16 and reduced."""
    sharding = replace(CASE.sharding, sync="each")
    given = replace(CASE, mesh=(ranks,), precision=NARROW, sharding=sharding)
    observed = observe(implementation, given)
    assert observed.judge().violations == ()
    assert observed.seen[0].declaration.semantics["accumulate"] == "reduce_again"
    if ranks == 1:  # on several this case is inside of both enclosures
        observed.seen[0].declaration.semantics["accumulate"] = "reduce_each"
        assert observed.judge().statuses["gradient"] == "violated"


def test_fp16_with_a_step_that_overflows(observe: Callable) -> None:
    training = Training(steps=3, loss_scale=1024.0, overflow=1)
    observed = observe("zero2", replace(CASE, precision=FP16, training=training))
    assert observed.judge().violations == ()
    assert [step.skipped for step in observed.seen[0].steps] == [False, True, False, False]


@pytest.mark.parametrize(
    ("role", "point", "step", "obligation"),
    [
        ("parameter", "state", 0, "publish"),
        ("master", "state", -1, "publish"),
        ("master", "state", 1, "update"),
        ("exp_avg", "state", 1, "update"),
        ("gradient", "reduced", 1, "gradient"),
        ("gradient", "clipped", 1, "clip"),
    ],
)
def test_one_element_that_is_off_is_seen(
    observe: Callable, role: str, point: str, step: int, obligation: str
) -> None:
    observed = observe("zero2", replace(CASE, precision=NARROW))
    _, tensor = next(
        (key, tensor)
        for key, tensor in observed.tensors.items()
        if (key[1].role, key[1].point, key[1].step) == (role, point, step) and tensor.numel()
    )
    flat = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    # The gradient is enclosed in bf16, and shown in fp32.
    flat[tensor.abs().argmax()] += (
        (1 << 21) if obligation == "gradient" else 64 if (role != "parameter") else 1
    )
    assert observed.judge().statuses[obligation] == "violated"


def test_masters_that_are_not_shown_are_missed(observe: Callable) -> None:
    observed = observe("zero2", replace(CASE, precision=NARROW))
    seen = [
        replace(one, records=tuple(r for r in one.records if r.role != "master"))
        for one in observed.seen
    ]
    observed.seen[:] = seen
    (violation,) = observed.judge().violations
    assert (violation.obligation, violation.role) == ("ownership", "master")


def test_what_is_computed_in_another_dtype_than_declared_is_a_wrong_loss(observe: Callable) -> None:
    observed = observe("fsdp2", replace(CASE, precision=WIDE))
    for one in observed.seen:
        one.declaration.semantics["compute"] = "own"
    assert observed.judge().statuses["loss"] == "violated"


def test_an_enclosure_that_holds_any_gradient_is_no_cause(observe: Callable) -> None:
    """Gradients below the smallest number of fp16: whatever stands there could be its rounding."""
    data = replace(CASE.data, loss_factor=1e-7)
    observed = observe("zero2", replace(CASE, precision=WIDE, data=data))
    for key, tensor in observed.tensors.items():
        if (key[1].role, key[1].point) == ("gradient", "reduced"):
            tensor.copy_(tensor.flip(0))
    first = observed.judge().violations[0]
    assert (first.obligation, first.causes) == ("gradient", ())
