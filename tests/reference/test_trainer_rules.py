"""The trainer's rules: unused parameters, buffers, masters, mid-training starts, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerocheck_reference import AdamWOptions, AdamWState, Group, Trainer

from .states import assert_judged
from .training import GROUPS, Loss, Torch, batches, losses_of, mlp

U = 2.0**-24


class Partial(nn.Module):
    """`b` is used on request only, `c` never; a buffer counts the calls and sums the inputs."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.c = nn.Parameter(torch.tensor([5.0]))
        self.frozen = nn.Parameter(torch.tensor([6.0]), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: float, use_b: bool = False) -> Tensor:
        self.seen += x
        out = (self.a * self.frozen).sum() * x
        return out + self.b.sum() if use_b else out


ALL = (Group(names=("a", "b", "c", "frozen"), options=AdamWOptions(lr=0.1, weight_decay=0.5)),)


def test_unused_parameters_are_skipped_as_in_torch() -> None:
    """What no rank used keeps value and step; what one rank used counts zeros of the others."""
    model = Partial()
    theirs = Torch(Partial(), ALL)
    trainer = Trainer(model, ALL)
    before = dict(trainer.state)
    result = trainer.step([[lambda m: m(1.0)], [lambda m: m(2.0, use_b=True)]])
    assert result.gradient["c"] is None and "frozen" not in result.gradient
    assert result.gradient["b"] is not None and result.gradient["b"].tolist() == [0.5, 0.5]
    ((theirs.model(1.0) + theirs.model(2.0, use_b=True)) / 2).backward()
    theirs.optimizer.step()
    after = theirs.state()
    assert set(after) == {"a", "b"}
    for name in ("a", "b"):
        g = result.gradient[name]
        assert g is not None and torch.equal(g, theirs.named[name].grad)  # type: ignore[arg-type]
        assert_judged(before[name], g, ALL[0].options, after[name], name)
        assert_judged(before[name], g, ALL[0].options, trainer.state[name], name)
    for name in ("c", "frozen"):
        assert trainer.state[name] is before[name]
        assert torch.equal(dict(model.named_parameters())[name], before[name].parameter)


def test_unused_parameters_as_zeros_decay() -> None:
    model = Partial()
    result = Trainer(model, ALL, unused="zero").step([[lambda m: m(1.0)]])
    assert result.gradient["c"] is not None and result.gradient["c"].tolist() == [0.0]
    assert model.c.item() == pytest.approx(5.0 * 0.95, rel=2 * U)
    assert model.frozen.item() == 6.0


def test_a_parameter_that_is_unfrozen_later_starts_at_its_own_step() -> None:
    model = Partial()
    trainer = Trainer(model, ALL)
    trainer.step([[lambda m: m(1.0)]])
    model.frozen.requires_grad_(True)
    trainer.step([[lambda m: m(1.0)]])
    assert (trainer.state["frozen"].step, trainer.state["a"].step) == (1, 2)
    assert model.frozen.item() != 6.0


def test_buffers_are_those_of_rank_0() -> None:
    model = Partial()
    trainer = Trainer(model, ALL)
    starts: list[float] = []

    def loss(x: float) -> Loss:
        def run(m: nn.Module) -> Tensor:
            starts.append(model.seen.item())
            out: Tensor = m(x)
            return out

        return run

    trainer.step([[loss(1.0), loss(2.0)], [loss(10.0), loss(20.0)]])
    assert starts == [0.0, 1.0, 0.0, 10.0]
    assert model.seen.item() == 3.0

    def fails(m: nn.Module) -> Tensor:
        m(5.0)
        raise RuntimeError("user's own")

    state = dict(trainer.state)
    with pytest.raises(RuntimeError, match="user's own"):
        trainer.step([[loss(1.0)], [fails]])
    assert model.seen.item() == 3.0
    assert all(trainer.state[name] is state[name] for name in state)


def test_set_state_starts_in_mid_training_and_copies() -> None:
    model = mlp()
    trainer = Trainer(model, GROUPS)
    weight = model.get_parameter("0.weight")
    shape = weight.shape
    given = AdamWState(torch.ones(shape), torch.ones(shape), torch.ones(shape), 255)
    trainer.set_state({"0.weight": given})
    assert torch.equal(weight, torch.ones(shape))
    given.parameter.zero_()
    given.exp_avg.zero_()
    assert trainer.state["0.weight"].exp_avg.sum() == shape.numel()
    trainer.step(losses_of(batches(1, 1, seed=0)))
    assert trainer.state["0.weight"].step == 256 and trainer.state["0.bias"].step == 1


def test_a_float32_master_of_a_bfloat16_model() -> None:
    """The state keeps what the model cannot hold, and its gradient is rounded to float32 only."""
    model = mlp().to(torch.bfloat16)
    options = AdamWOptions(lr=1e-6, weight_decay=0.0)
    names = tuple(n for n, _ in model.named_parameters())
    trainer = Trainer(model, [Group(names=names, options=options)])
    masters = {
        n: AdamWState(p.detach().float(), torch.zeros(p.shape), torch.zeros(p.shape), 0)
        for n, p in model.named_parameters()
    }
    trainer.set_state(masters)

    def cast(loss_batch: Any) -> Loss:
        x, y = (t.to(torch.bfloat16) for t in loss_batch)
        return lambda m: nn.functional.mse_loss(m(x).float(), y.float())

    result = trainer.step([[cast(row[0])] for row in batches(2, 1, seed=0)])
    moved = finer = 0
    for name, p in model.named_parameters():
        state, g = trainer.state[name], result.gradient[name]
        assert g is not None and g.dtype == state.parameter.dtype == torch.float32
        assert torch.equal(p, state.parameter.to(torch.bfloat16))
        finer += int((g != g.to(torch.bfloat16)).sum())
        moved += int((state.parameter != masters[name].parameter).sum())
    assert moved > 0 and finer > 0


def test_groups_are_validated() -> None:
    def trainer(*names: tuple[str, ...], model: nn.Module | None = None) -> Trainer:
        options = AdamWOptions()
        return Trainer(model or mlp(), [Group(names=n, options=options) for n in names])

    rest = ("0.bias", "2.weight", "2.bias")
    with pytest.raises(
        ValueError, match=r"unknown parameter '0\.wieght'; did you mean '0\.weight'"
    ):
        trainer(("0.wieght", *rest))
    with pytest.raises(ValueError, match=r"more than once: 0\.bias"):
        trainer(("0.weight", *rest), ("0.bias",))
    with pytest.raises(ValueError, match="more than once: x"):
        Group(names=("x", "x"), options=AdamWOptions())
    with pytest.raises(ValueError, match=r"in no group: 0\.weight "):
        trainer(rest)
    with pytest.raises(ValueError, match="a tuple of strings"):
        Group(names="0.weight", options=AdamWOptions())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="options is None"):
        Group(names=(), options=None)  # type: ignore[arg-type]
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ValueError, match=r"'b\.weight' is tied to 'a\.weight'"):
        trainer(("b.weight",), model=tied)
    assert list(trainer(("a.weight",), model=tied).state) == ["a.weight"]


def test_arguments_are_validated_before_anything_changes() -> None:
    for bad in (
        {"max_norm": -1.0},
        {"norm_type": 1.0},
        {"clip_rule": "clip"},
        {"average": "median"},
        {"divide": "both"},
        {"unused": "drop"},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Trainer(mlp(), GROUPS, **bad)
    model = Partial()
    trainer = Trainer(model, [Group(names=("a", "b", "c"), options=AdamWOptions())])
    loss: Loss = lambda m: m(1.0)  # noqa: E731
    ragged: list[list[list[Loss]]] = [[], [[]], [[loss], [loss, loss]]]
    for rows in ragged:
        with pytest.raises(ValueError, match="the same number of microbatches"):
            trainer.step(rows)
    with pytest.raises(ValueError, match="lr has 2 values"):
        trainer.step([[loss]], lr=[0.1, 0.1])
    with pytest.raises(ValueError, match="lr is nan"):
        trainer.step([[loss]], lr=[math.nan])
    good = trainer.state["a"]
    for name, state, message in (
        ("aa", good, "unknown parameter 'aa'; did you mean 'a'"),
        ("frozen", good, "unknown parameter 'frozen'"),
        ("c", good, r"shape \(2,\) .*the parameter's, \(1,\)"),
        ("b", good._replace(step=-1), "state of 'b': step is -1"),
        ("b", good._replace(max_exp_avg_sq=good.exp_avg), "amsgrad=False"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.set_state({"a": good._replace(step=9), name: state})
    assert trainer.state["a"] is good
    model.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="in no group: frozen"):
        trainer.step([[loss]])
    assert model.seen.item() == 0.0 and trainer.state["a"] is good
