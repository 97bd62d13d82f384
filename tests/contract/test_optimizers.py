"""Torch's optimizers behind wrappers, lists and classes of a user's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerocheck.case.schema import Case
from zerocheck.contract.groups import check_options
from zerocheck.contract.optimizers import Optimizers, set_learning_rate
from zerocheck.errors import UsageError
from zerocheck.models import build_model
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.trial import template_of

ADAMW, SGD = OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters)


class Stepping:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def step(self) -> None: ...


def test_wrappers_are_seen_through(parameters: list[nn.Parameter]) -> None:
    inner = adamw(parameters)
    once = Stepping(optimizer=inner, param_groups=inner.param_groups)
    twice = Stepping(_optimizer=once, param_groups=inner.param_groups)
    for given in (inner, once, twice):
        found = Optimizers(given, parameters)
        assert found.inner == (inner,) and not found.opaque
        assert len(list(found.groups())) == 1


def test_an_own_class_shows_what_it_keeps_in_attributes(parameters: list[nn.Parameter]) -> None:
    first, second = adamw(parameters[:1]), adamw(parameters[1:])
    found = Optimizers(Stepping(parts={"a": first, "b": second}), parameters)
    assert found.inner == (first, second) and found.opaque
    assert not Optimizers(Stepping(), parameters).inner


def test_optimizers_of_other_parameters_are_not_taken(parameters: list[nn.Parameter]) -> None:
    averages = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    assert not Optimizers(Stepping(averages=averages), parameters).inner
    assert not Optimizers(averages, parameters).has_some
    assert Optimizers(torch.optim.AdamW([{"params": []}]), parameters).has_some


def test_several_are_stepped_and_cleared(parameters: list[nn.Parameter]) -> None:
    found = Optimizers([adamw(parameters[:1]), adamw(parameters[1:])], parameters)
    model = SimpleNamespace(zero_grad=lambda _: None)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    found.step()
    assert all(float(parameter.detach().max()) < 1 for parameter in parameters)
    found.zero_grad(model, set_to_none=True)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize(("given", "words"), [(object(), "has no step"), ([], "an empty list")])
def test_what_cannot_step_is_refused(given: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Optimizers(given, [])


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    group = {"lr": torch.tensor(0.5)}
    kept = group["lr"]
    set_learning_rate(group, 0.25)
    assert group["lr"] is kept and float(kept) == 0.25


@pytest.mark.parametrize(
    "kind", ["NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adafactor"]
)
def test_other_optimizers_of_torch_say_which_option_they_need(
    parameters: list[nn.Parameter], kind: str
) -> None:
    made = getattr(torch.optim, kind)(parameters)
    for wanted in (ADAMW, SGD):
        with pytest.raises(UsageError, match=f"is {kind}, .* --optimizer {kind.lower()}"):
            template_of(made, {}, wanted)
    assert template_of(made, {}, OPTIMIZERS[kind.lower()]) is None


def test_optimizers_of_torch_that_are_not_judged_are_refused(
    parameters: list[nn.Parameter],
) -> None:
    with pytest.raises(
        UsageError, match="is SparseAdam; to judge SparseAdam by itself, unsharded: --optimizer "
    ):
        template_of(torch.optim.SparseAdam(parameters), {}, ADAMW)


def test_adam_is_taken_for_adamw_where_the_case_has_that(parameters: list[nn.Parameter]) -> None:
    adam = torch.optim.Adam(parameters)
    assert template_of(adam, {}, ADAMW) is None
    assert template_of(adam, {}, OPTIMIZERS["adam"]) is None
    with pytest.raises(UsageError, match=r"is AdamW, and the cases .* Adam: .* --optimizer adamw"):
        template_of(adamw(parameters), {}, OPTIMIZERS["adam"])


def test_another_one_that_is_known_says_which_option_it_needs(
    parameters: list[nn.Parameter],
) -> None:
    sgd = torch.optim.SGD(parameters, lr=0.1)
    assert template_of(sgd, {}, SGD) is None
    with pytest.raises(UsageError, match=r"is SGD, and the cases .* AdamW: .* --optimizer sgd"):
        template_of(sgd, {}, ADAMW)
    with pytest.raises(UsageError, match=r"is AdamW, and the cases .* SGD: .* --optimizer adamw"):
        template_of(adamw(parameters), {}, SGD)


def test_a_class_of_its_own_that_is_sgd(parameters: list[nn.Parameter]) -> None:
    class Plain(torch.optim.Optimizer):
        damp = 0.0

        def __init__(
            self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0
        ) -> None:
            given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
            super().__init__(params, given)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    d = one.grad + group["weight_decay"] * one
                    buffer = self.state[one].setdefault("momentum_buffer", torch.zeros_like(one))
                    buffer.mul_(group["momentum"]).add_(d, alpha=1 - self.damp)
                    one.sub_(group["lr"] * buffer)

    class Damped(Plain):
        damp = 0.5

    assert template_of(Plain(parameters), {}, SGD) is not None
    with pytest.raises(UsageError, match=r"Damped, which is not SGD: .* is off by"):
        template_of(Damped(parameters), {}, SGD)
    with pytest.raises(UsageError, match="no exp_avg or exp_avg_sq"):
        template_of(Plain(parameters), {}, ADAMW)


def test_adamw_and_its_subclasses_are_taken(parameters: list[nn.Parameter]) -> None:
    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (adamw(parameters), Mine(parameters), torch.optim.Adam(parameters)):
        assert template_of(optimizer, {}, ADAMW) is None


def test_an_option_of_the_same_name_and_another_meaning(parameters: list[nn.Parameter]) -> None:
    """Adafactor of transformers has two numbers in eps. It was a TypeError in the ranks."""

    class Factored(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3, eps: Any = (1e-30, 1e-3)) -> None:
            super().__init__(params, {"lr": lr, "eps": (1e-30, 1e-3)})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["exp_avg_sq_row"] = torch.zeros(1)

    with pytest.raises(UsageError, match="whose state has 'exp_avg_sq_row'"):
        template_of(Factored(parameters), {}, ADAMW)


def test_a_step_that_is_compiled(parameters: list[nn.Parameter]) -> None:
    """AdamW of torchao in fp32: Inductor's kernels were 3 times the bound of AdamW's away."""

    class Compiled(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})
            self.inner = torch.optim.AdamW(self.param_groups)
            self.state = self.inner.state

        def step(self, closure: Any = None) -> None:
            torch.compile(self.inner.step, fullgraph=True)()

    with pytest.raises(UsageError, match=r"Compiled, whose step calls torch\.compile"):
        template_of(Compiled(parameters), {}, ADAMW)


def test_a_group_with_another_kind_of_option(parameters: list[nn.Parameter]) -> None:
    """Adafactor of transformers again, where its class cannot be made from its own defaults."""
    case = Case()
    model = build_model(case)
    wanted = {"lr": 1e-3, "eps": (1e-30, 1e-3), "params": list(model.parameters())}
    with pytest.raises(UsageError, match=r"has eps \(1e-30, 0.001\) in a parameter group"):
        check_options([wanted], {id(p): 0 for p in model.parameters()}, case)
