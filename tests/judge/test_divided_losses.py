"""Trainers that take the mean over ranks in their losses, as torchtitan does, and sum gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.case.schema import Block, Case, Data, Model, Training
from zerocheck.contract import Implementation
from zerocheck.faults.gradient import DivisionLeftOn, MeanInTheLosses

CASE = Case(
    mesh=(3,),
    seed=4,
    model=Model(
        stem="embedding", inputs=7, width=6, outputs=5, blocks=(Block(kind="mlp", hidden=7),)
    ),
    data=Data(batch=2, length=3, masked=True),
    training=Training(steps=2, microbatches=5, clip=0.01, loss_scale=3.0),
)
"""Tokens, three ranks, five microbatches and a loss scale: no factor is a power of two."""


class Right(MeanInTheLosses):
    semantics = DivisionLeftOn.semantics
    train_step = Fsdp2.train_step


class NeverDivided(Right):
    semantics = replace(Right.semantics, divide_ranks="loss")

    def _objective(self, loss, weight, count):  # type: ignore[no-untyped-def]
        return super()._objective(loss, weight, count) * self.case.axes.data_parallel_size


def _judged(observe: Callable, kind: type[Implementation], case: Case = CASE) -> dict:
    judgement = observe(f"{kind.__module__}:{kind.__name__}", case).judge()
    return {one.obligation: one for one in judgement.violations}


@pytest.mark.parametrize("scale", [None, 3.0])
def test_a_declared_mean_in_the_losses_holds(observe: Callable, scale: float | None) -> None:
    training = msgspec.structs.replace(CASE.training, loss_scale=scale)
    assert _judged(observe, Right, msgspec.structs.replace(CASE, training=training)) == {}


@pytest.mark.parametrize(
    ("kind", "microbatches", "cause", "message"),
    [
        # With five the bound is wider than what the backward rounds otherwise.
        (MeanInTheLosses, 3, "mean in the losses", "declare Semantics(divide_ranks='loss')"),
        (DivisionLeftOn, 5, "gradient / W", "times too small"),
        (NeverDivided, 5, "gradient x W", ""),
    ],
)
def test_what_is_wrong_is_named(
    observe: Callable, kind: type[Implementation], microbatches: int, cause: str, message: str
) -> None:
    training = Training(steps=2, microbatches=microbatches, clip=0.01)
    found = _judged(observe, kind, msgspec.structs.replace(CASE, training=training))
    assert found["gradient"].causes == (cause,)
    assert message in found["gradient"].explanation
