"""Cases with SGD and Muon: drawn next to those with AdamW, which stay what they are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.optimizer_options import fused_fails, is_matrix_of_muon
from zerocheck.case.reductions import simpler
from zerocheck.case.schema import Block, Case, Model, Optimizer, OptimizerKind, Training
from zerocheck.case.shapes import parameter_dtypes
from zerocheck.case.validity import check
from zerocheck.errors import UsageError

SGD = {"optimizer": {"kind": "sgd"}}


def test_a_case_with_sgd_is_the_same_but_for_its_optimizer() -> None:
    first = draw(40, seed=5, world_sizes=(2, 3))
    other = draw(40, seed=5, world_sizes=(2, 3), fixed=SGD)
    assert [replace(one, optimizer=Optimizer()) for one in first] == [
        replace(one, optimizer=Optimizer()) for one in other
    ]
    assert all(one.optimizer.kind == "adamw" for one in first)
    assert all(one.optimizer.momentum == 0 and not one.optimizer.nesterov for one in first)


def test_options_of_sgd_are_drawn_and_valid() -> None:
    cases = draw(200, seed=1, world_sizes=(1, 2), fixed=SGD)
    options = [one.optimizer for one in cases]
    assert {one.momentum for one in options} == {0.0, 0.5, 0.9}
    assert {one.nesterov for one in options} == {False, True}
    assert {one.kernel for one in options} == {"foreach", "for-loop", "fused"}
    assert not any(one.amsgrad or (one.nesterov and not one.momentum) for one in options)
    assert not any(fused_fails(one.optimizer, one) for one in cases)


def test_fixed_options_stay() -> None:
    fixed = {"optimizer": {"kind": "sgd", "momentum": 0.25, "nesterov": True, "kernel": "fused"}}
    for case in draw(30, seed=2, world_sizes=(2,), fixed=fixed):
        assert (case.optimizer.momentum, case.optimizer.nesterov) == (0.25, True)
        assert case.optimizer.kernel == "fused"


def test_what_breaks_the_fused_kernel() -> None:
    fused = Optimizer(kind="sgd", momentum=0.9, kernel="fused")
    assert not fused_fails(fused, Case())
    assert fused_fails(fused, Case(model=Model(blocks=(Block(kind="mlp", dtype="bf16"),))))
    assert fused_fails(fused, Case(model=Model(blocks=(Block(kind="mlp", transposed=True),))))
    late = Case(model=Model(frozen=("head.*",)), training=Training(unfreeze=1))
    assert fused_fails(fused, late) and not fused_fails(replace(fused, momentum=0.0), late)
    assert not fused_fails(Optimizer(kernel="fused"), late)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Optimizer(momentum=0.9), "optimizer.momentum is 0.9, and optimizer.kind is 'adamw'"),
        (Optimizer(kind="sgd", amsgrad=True), "optimizer.amsgrad is True"),
        (Optimizer(kind="sgd", nesterov=True), "optimizer.nesterov needs a momentum"),
    ],
)
def test_options_of_another_optimizer_are_refused(options: Optimizer, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(Case(optimizer=options))


def _shrunk(case: Case) -> Case:
    """The smallest case, if all of them fail; each has SGD."""
    search = simpler(case)
    candidate = next(search)
    while True:
        assert candidate.optimizer.kind == "sgd"
        try:
            candidate = search.send(True)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def test_a_case_shrinks_to_the_simplest_with_sgd() -> None:
    case = draw(5, seed=3, world_sizes=(3,), fixed=SGD)[-1]
    assert _shrunk(case).optimizer == Optimizer(kind="sgd")


MUON = {"optimizer": {"kind": "muon"}}


def test_a_case_with_muon_is_the_same_but_for_its_optimizer() -> None:
    first = draw(60, seed=5, world_sizes=(2, 3))
    other = draw(60, seed=5, world_sizes=(2, 3), fixed=MUON)

    def rest(case: Case) -> Case:
        training = replace(case.training, overflow_in=None)
        return replace(case, optimizer=Optimizer(), training=training)

    assert [*map(rest, first)] == [*map(rest, other)]


def test_options_of_muon_are_drawn_and_valid() -> None:
    cases = draw(200, seed=1, world_sizes=(1, 2), fixed=MUON)
    options = [one.optimizer for one in cases]
    assert {one.momentum for one in options} == {0.95, 0.5}
    assert {one.nesterov for one in options} == {False, True}
    assert {one.adjustment for one in options} == {"original", "match_rms_adamw"}
    assert {one.fallback for one in options} == {("stem.*", "head.*"), ("stem.*",), ()}
    assert not any(one.amsgrad or one.maximize for one in options)
    # Where torch's Muon loses its momentum, and where a GradScaler skips one optimizer of two.
    narrow = [one for one in cases if "bf16" in parameter_dtypes(one.model).values()]
    assert narrow and all(one.optimizer.nesterov for one in narrow)
    assert not any(one.training.overflow_in for one in cases)
    assert {len(one.optimizer.groups) for one in cases} == {1, 2, 3}


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (Optimizer(kind="muon", maximize=True), "optimizer.maximize is True"),
        (Optimizer(adjustment="match_rms_adamw"), "optimizer.adjustment is 'match_rms_adamw'"),
        (Optimizer(kind="sgd", fallback=("stem.*",)), "optimizer.fallback is"),
    ],
)
def test_options_that_muon_alone_has(optimizer: Optimizer, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        check(Case(optimizer=optimizer))


def test_matrices_of_muon() -> None:
    options = Optimizer(kind="muon", fallback=("stem.*",))
    assert is_matrix_of_muon(options, "blocks.0.up.weight", (4, 3))
    for name, shape in (
        ("stem.weight", (4, 3)),
        ("head.bias", (4,)),
        ("a", (2, 0)),
        ("b", (2, 3, 4)),
    ):
        assert not is_matrix_of_muon(options, name, shape)


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "asgd", "rprop"])
def test_cases_with_another_optimizer_are_valid_and_differ_by_it_alone(kind: OptimizerKind) -> None:
    cases = draw(40, seed=3, world_sizes=(2, 3), fixed={"optimizer": {"kind": kind}})
    with_adamw = draw(40, seed=3, world_sizes=(2, 3))
    for one, other in zip(cases, with_adamw, strict=True):
        check(one)
        assert one.optimizer.kind == kind
        assert (one.model, one.sharding, one.data) == (other.model, other.sharding, other.data)
        assert "other-optimizer" in features(one) and "other-optimizer" not in features(other)
    options = [one.optimizer for one in cases]
    assert any(one.amsgrad for one in options) == (kind == "adam")
    assert any(one.momentum for one in options) == (kind == "rmsprop")
    assert (kind == "asgd") <= all(one.schedule == "constant" for one in options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Optimizer(kind="radam", amsgrad=True), "optimizer.amsgrad is True"),
        (Optimizer(kind="adam", momentum=0.5), "optimizer.momentum is 0.5"),
        (Optimizer(kind="rmsprop", momentum=0.5, nesterov=True), "optimizer.nesterov is True"),
        (Optimizer(kind="asgd", schedule="cosine"), "ASGD keeps the rate of the step before"),
    ],
)
def test_options_that_others_do_not_have(options: Optimizer, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(Case(optimizer=options))
