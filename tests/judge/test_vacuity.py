"""What a case could tell of each obligation, on real observations."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Group, Model, Optimizer, Training
from zerocheck.judge.state import State
from zerocheck.judge.vacuity import Vacuity

CASE = Case(
    mesh=(2,),
    model=Model(inputs=5, width=6, outputs=3, blocks=(Block(kind="batch_norm"),)),
    data=Data(batch=2, length=3),
    training=Training(steps=2, clip=0.01),
)


def changed(**sections: dict[str, object]) -> Case:
    """CASE with other fields."""
    case = CASE
    for section, fields in sections.items():
        case = replace(case, **{section: replace(getattr(case, section), **fields)})
    return case


@pytest.mark.parametrize("implementation", ["zero1", "zero2", "zero3", "fsdp2"])
def test_a_full_case_tells_of_everything(observe: Callable, implementation: str) -> None:
    judgement = observe(implementation, CASE).judge()
    assert judgement.vacuous == () and not judgement.violations


@pytest.mark.parametrize(
    ("case", "vacuous"),
    [
        (replace(CASE, mesh=(1,)), {"ownership", "publish"}),
        (changed(training={"clip": 1e6}), {"clip"}),
        (changed(model={"calls": ()}), {"buffers"}),
        (changed(optimizer={"groups": (Group(lr=0.0, weight_decay=0.0),)}), {"update", "publish"}),
        # Softmax over one class: the loss is 0 whatever the parameters are.
        (
            replace(
                CASE,
                model=Model(stem="embedding", inputs=5, width=6, outputs=1),
                training=Training(steps=2),
                optimizer=Optimizer(groups=(Group(weight_decay=0.0),)),
            ),
            {"loss", "gradient", "update", "publish"},
        ),
    ],
    ids=["one rank", "inactive clipping", "no buffer changes", "no step", "no loss"],
)
def test_what_could_not_have_failed_is_vacuous(
    observe: Callable, case: Case, vacuous: set[str]
) -> None:
    judgement = observe("zero3", case).judge()
    assert set(judgement.vacuous) == vacuous
    assert not judgement.violations
    assert all(judgement.statuses[obligation] == "holds" for obligation in vacuous)


def test_replicas_own_nothing(observe: Callable) -> None:
    assert observe("ddp", CASE).judge().vacuous == ("ownership",)


def test_what_is_violated_is_not_vacuous(observe: Callable) -> None:
    observed = observe("ddp", changed(training={"clip": 1e6}))
    for _, data in observed.places("gradient", "clipped", 0, "head.weight"):
        data[0] += 1.0
    judgement = observed.judge()
    assert "clip" not in judgement.vacuous and judgement.statuses["clip"] == "violated"


def test_it_is_written_down(observe: Callable) -> None:
    judgement = observe("ddp", CASE).judge()
    back = msgspec.json.decode(msgspec.json.encode(judgement), type=type(judgement))
    assert back.vacuous == judgement.vacuous


def test_an_obligation_without_a_rule_is_not_vacuous(observe: Callable) -> None:
    """A new obligation is not reported as vacuous because nobody takes its evidence."""
    vacuity = Vacuity(observe("ddp", CASE).seen)
    assert vacuity.among(("loss", "release")) == ("loss",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_evidence(observe: Callable, value: float) -> None:
    """NaN is unlike itself, and so was taken for a parameter that moved."""
    lost, right = torch.full((4,), value), torch.tensor([1.0, 2.0, value, value])
    for before, after, moved in ((lost, lost, False), (right, lost, False), (lost, right, True)):
        vacuity = Vacuity(observe("ddp", CASE).seen)
        vacuity.moved(*(State(one, [one], {}, {}, []) for one in (before, after)))
        vacuity.clipped([(before, after)])
        assert (vacuity.among(("update", "publish", "clip")) == ()) is moved
        vacuity.buffers([{"mean": before}], [{"mean": after}])
        assert (vacuity.among(("buffers",)) == ()) is moved
