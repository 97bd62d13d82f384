"""What is seen of the user's optimizer class, and which classes are refused."""

from __future__ import annotations

import own_optimizers
import pytest
import torch

from zerocheck.case.schema import UserState
from zerocheck.errors import UsageError
from zerocheck.optimizers.user.inspection import inspect_optimizer


def of(name: str) -> str:
    return f"{own_optimizers.__file__}:{name}"


def test_an_elementwise_class_without_a_count() -> None:
    lion = inspect_optimizer(of("Lion"))
    assert lion.elementwise and lion.weight_decay and lion.bf16 and not lion.maximize
    assert lion.count == "none"
    (state,) = lion.states
    assert (state.name, state.power, state.signed, state.wide) == ("exp_avg", 1, True, False)
    assert 0 < state.size < 1


def test_a_class_that_needs_whole_parameters_and_counts_in_an_int() -> None:
    found = inspect_optimizer(of("Normalized"))
    assert not found.elementwise and found.count == "int" and not found.weight_decay
    assert [one.name for one in found.states] == ["momentum"]


def test_a_class_that_counts_in_its_group() -> None:
    found = inspect_optimizer(of("Corrected"))
    assert found.elementwise and found.count == "group"
    assert [one.name for one in found.states] == ["mean"]


@pytest.mark.parametrize("name", ["Factored", "KeepsDims"])
def test_a_class_with_factored_states(name: str) -> None:
    found = inspect_optimizer(of(name))
    assert not found.elementwise and found.count == "none"
    kinds = {one.name: (one.of_matrices, one.of_vectors) for one in found.states}
    assert kinds == {
        "row": ("rows", "none"),
        "column": ("columns", "none"),
        "scale": ("number", "none"),
        "square": ("none", "whole"),
    }
    assert {one.keeps_dims for one in found.states[:2]} == {name == "KeepsDims"}


def test_the_size_of_a_state_its_signs_and_its_dtype() -> None:
    (state,) = inspect_optimizer(of("Wide")).states
    assert isinstance(state, UserState)
    assert (state.power, state.signed, state.wide) == (2, False, True)
    assert not inspect_optimizer(of("WithoutBf16")).bf16


def test_torchs_own_are_seen_as_they_are() -> None:
    found = inspect_optimizer("torch.optim:RMSprop")
    assert found.elementwise and found.count == "tensor" and found.maximize
    assert [(one.name, one.power, one.signed) for one in found.states] == [("square_avg", 2, False)]


def test_random_states_are_kept() -> None:
    before = torch.get_rng_state()
    inspect_optimizer(of("Lion"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NOT_A_CLASS", "it is a int; needed is a subclass of torch.optim.Optimizer"),
        ("right", "it is a function; needed is a subclass"),
        ("Bits", r"has the state 'm' of dtype torch.int8, .* quantized states are not judged"),
        ("BitsOfMany", r"of dtype torch.int8, of a parameter of shape \(256, 256\): quantized"),
        ("BitsWithin", r"of dtype Quantized, of a parameter of shape \(256, 256\): quantized"),
        ("MoreOfMany", r"has the states scale of a parameter of shape \(256, 256\), and none of"),
        ("Rows", r"has the state 'all', of type dict, of a parameter of shape \(24, 40\)"),
        ("Halves", r"has the state 'half', a tensor of shape \(12,\) .* of shape \(24, 40\)"),
        ("FirstDims", r"has no state of a parameter of shape \(3, 24, 40\); needed is 'rows'"),
        ("Named", "has the state 'buffer', a name that zerocheck has for something else"),
        ("CountsInGroup", "keeps 'k' in its parameter group and changes it in a step"),
        ("CountsInBoth", "counts steps in its state and in its parameter group"),
        ("CountsTwice", "has the state 'step', of type int, after 3 steps; needed is their number"),
        ("NeedsClosure", "needs a closure in step"),
        ("NeedsRate", "cannot be made from parameters alone: TypeError: .* 'lr'"),
        ("WithoutRate", "has no option lr"),
        ("Random", "is not deterministic"),
        ("ByGlobalNorm", "updates a parameter otherwise when there are others next to it"),
        ("Fails", "fails on a matrix and a vector alone: RuntimeError: no luck"),
        ("Lio", "has no 'Lio'; did you mean 'Lion'"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        inspect_optimizer(of(name))
