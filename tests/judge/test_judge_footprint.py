"""Bytes and volumes beside the ZeRO paper, from figures worked out by hand."""

from __future__ import annotations

import pytest

from zerocheck.case.schema import Block, Case, Model, Optimizer
from zerocheck.catalogue import BUILT_IN
from zerocheck.contract.loading import load
from zerocheck.judge.footprint import copy_bytes, measured_bytes
from zerocheck.memory.formulas import STAGES, recipe, total
from zerocheck.protocol.layout import Call, Layout, Line
from zerocheck.protocol.measurements import Measured
from zerocheck.protocol.verdicts import MeasuredBytes
from zerocheck.run.records.footprint import ideal, in_psi, nearest

MODEL = Model(inputs=3, width=2, outputs=5)  # 8 + 15 elements
COPY = (92, 92, 184)


def lines(step: int, parameter: int) -> tuple[Line, ...]:
    return (
        Line("step", step, "parameter", parameter),
        Line("step", step, "gradient", 10),
        Line("step", step, "optimizer", 30),
        Line("step", step, "bucket", 5),
        Line("step", step, "activation", 1000),
        Line("step", step, "buffer", 1000),
        Line("forward", step, "gathered", 1000),
        Line("closed", step, "parameter", 1000),
    )


def test_the_last_step_counts_and_the_fullest_rank() -> None:
    calls = (
        (),
        (
            Call("all_reduce", 60, 2, "float32", "backward", 1),
            Call("all_gather", 16, 2, "float32", "step", 1),
            Call("all_reduce", 40, 2, "float32", "backward", 1),
            Call("barrier", 0, 2, "", "step", 1),
        ),
    )
    ranks = [
        Measured(lines=(*lines(0, 500), *lines(1, 20)), calls=calls, steps=2, stage=2),
        Measured(lines=(*lines(0, 500), *lines(1, 40)), calls=calls, steps=2, stage=2),
    ]
    got = measured_bytes(Case(mesh=(2,), model=MODEL), ranks)
    assert got == MeasuredBytes(
        copy=COPY, held=85, total=150, sent=108.0, trained=92, elements=23, stage=2,
        by_kind={"all_reduce": 100.0, "all_gather": 8.0},
    )  # fmt: skip
    answer = [Measured(lines=lines(1, 1), layout=Layout(lines=lines(1, 1)))] * 2
    assert (measured_bytes(Case(mesh=(2,), model=MODEL), answer) or got).predicted
    assert measured_bytes(Case(mesh=(2,), model=MODEL), [Measured(), Measured()]) is None


def test_one_copy_by_what_learns_and_by_dtype() -> None:
    assert copy_bytes(Case(model=MODEL)) == COPY
    assert copy_bytes(Case(model=MODEL, optimizer=Optimizer(amsgrad=True))) == (92, 92, 276)
    frozen = Model(inputs=3, width=2, outputs=5, frozen=("stem.*",))
    assert copy_bytes(Case(model=frozen)) == (92, 60, 120)
    narrow = Model(inputs=3, width=2, outputs=5, blocks=(Block(kind="layer_norm", dtype="bf16"),))
    assert copy_bytes(Case(model=narrow)) == (100, 100, 200)


@pytest.mark.parametrize("stage", STAGES)
def test_the_ideal_is_that_of_the_formulas(stage: int) -> None:
    for ranks in (1, 2, 3, 8):
        assert ideal(COPY, ranks, stage) == pytest.approx(
            float(total(23, ranks, stage, recipe("fp32"))), rel=1e-15
        )


@pytest.mark.parametrize("stage", STAGES)
def test_the_nearest_stage_is_the_one_that_it_is(stage: int) -> None:
    held = round(ideal(COPY, 4, stage) * 1.05)
    one = MeasuredBytes(copy=COPY, held=held, total=0, sent=0, trained=92, elements=23)
    assert nearest(one, 4) == stage


def test_volumes_in_psi() -> None:
    assert in_psi(92 * 2 * 3 / 4, 92, 4) == 2
    assert in_psi(0.0, 92, 1) == 0 and in_psi(12.0, 0, 2) == 0


def test_built_in_implementations_declare_the_stage_of_the_formulas() -> None:
    assert {name: load(name).stage for name in BUILT_IN} == {
        "ddp": 0,
        "fsdp1-no-shard": 0,
        "zero-redundancy": 1,
        "zero1": 1,
        "zero2": 2,
        "fsdp1-grad-op": 3,  # between steps, which is what the formulas are about
        "fsdp1": 3,
        "fsdp2": 3,
        "zero3": 3,
    }
