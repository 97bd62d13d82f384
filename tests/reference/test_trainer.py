"""The trainer against torch.optim.AdamW with clip_grad_norm_ and gradient accumulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zerocheck_reference import Trainer, adamw_step, clip_coefficient, cosine, half_ulp

from .states import assert_judged
from .training import GROUPS, Torch, batches, losses_of, mlp, mse

U, ETA = 2.0**-24, 2.0**-149


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("max_norm", [None, 0.05, 100.0])
def test_training_is_that_of_torch(ranks: int, microbatches: int, max_norm: float | None) -> None:
    """Four steps by induction: each from the state that torch held, under a schedule of its own.

    torch accumulates loss / (N M) over the same local graphs, so its terms differ from ours by one
    rounding (none for powers of two: the divisions commute with all that follows) and its sum by
    N M - 1. Ours is rounded once. Where N M is no power of two, the divisor meets the bits of the
    whole backward, and one kernel rounding per operation of it would have to be counted; there the
    loss is divided by nothing and the gradient by N M, K = N M - 1 + 1.

    Then, with E the error of the gradient: torch's norm is off by |E| + u (n/2 + 4) norm, and given
    its norm its clipped gradient by 4 u + the product. The states are judged by the bounds of
    bounds.py, each with the gradient that its own trainer used, which the first part ties together.
    """
    count = ranks * microbatches
    power = count & (count - 1) == 0
    theirs, model = Torch(mlp()), mlp()
    trainer = Trainer(model, GROUPS, max_norm=max_norm, divide="loss" if power else "gradient")
    schedule = cosine(1, 5)
    for step in range(4):
        data = batches(ranks, microbatches, seed=step)
        before = dict(trainer.state)
        rates = [group.options.lr * schedule(step) for group in GROUPS]
        result = trainer.step(losses_of(data), lr=rates)

        theirs.optimizer.zero_grad()
        size = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in theirs.named.items()}
        for r, row in enumerate(data):
            for m, batch in enumerate(row):
                old = {n: p.grad for n, p in theirs.named.items()}
                theirs.optimizer.zero_grad()
                loss = mse(batch)(theirs.model)
                assert torch.equal(loss.detach(), result.losses[r][m])
                (loss / count if power else loss).backward()  # type: ignore[no-untyped-call]
                for name, p in theirs.named.items():
                    assert p.grad is not None
                    size[name] += p.grad.double().abs()
                    before_it = old[name]
                    if before_it is not None:
                        p.grad = before_it + p.grad
        error = 0.0
        k = count - 1 + (not power)
        for name, p in theirs.named.items():
            assert p.grad is not None
            if not power:
                p.grad = p.grad / count
                size[name] /= count
            mine = result.gradient[name]
            assert mine is not None
            bound = k * U / (1 - k * U) * size[name] + k * ETA + half_ulp(size[name])
            assert bool(((p.grad.double() - mine.double()).abs() <= bound * (1 + 1e-6)).all())
            error += bound.square().sum().item()
        raw = {name: p.grad.clone() for name, p in theirs.named.items() if p.grad is not None}
        used = raw
        coefficient = 1.0
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.named.values(), max_norm).item()
            n = sum(p.numel() for p in theirs.named.values())
            assert abs(norm - result.norm) <= math.sqrt(error) + U * (n / 2 + 4) * norm
            coefficient = clip_coefficient(norm, max_norm)
            used = {name: p.grad.clone() for name, p in theirs.named.items() if p.grad is not None}
            for name, g in used.items():
                exact = raw[name].double() * coefficient
                slack = half_ulp(exact) + 4 * U * exact.abs() + ETA
                assert bool(((g.double() - exact).abs() <= slack * (1 + 1e-6)).all())
        assert (result.coefficient < 1.0) == (max_norm == 0.05)

        for held, rate in zip(theirs.optimizer.param_groups, rates, strict=True):
            held["lr"] = rate
        theirs.optimizer.step()
        after = theirs.state()
        for group, rate in zip(GROUPS, rates, strict=True):
            for name in group.names:
                options = replace(group.options, lr=rate)
                mine = result.gradient[name]
                assert mine is not None
                g = (mine.double() * result.coefficient).float()
                assert_judged(before[name], used[name], options, after[name], name)
                assert_judged(before[name], g, options, trainer.state[name], name)
                written = dict(model.named_parameters())[name]
                assert torch.equal(written, trainer.state[name].parameter)
        trainer.set_state(after)


def test_the_global_batch_is_the_concatenated_one_exactly() -> None:
    """Small integers, sizes that are powers of two: no operation rounds, so the bits agree.

    The mean over ranks and microbatches of mean losses is the mean loss of all samples. From equal
    bits of the gradient, torch's AdamW must land in the bounds, and so must ours.
    """
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    for attempt in range(3):
        theirs, model = Torch(mlp(attempt)), mlp(attempt)
        for divide in ("loss", "gradient"):
            for p, q in zip(theirs.model.parameters(), model.parameters(), strict=True):
                value = integers(*p.shape)
                p.data.copy_(value)
                q.data.copy_(value)
            theirs.optimizer.state.clear()
            trainer = Trainer(model, GROUPS, divide=divide)
            before = dict(trainer.state)
            data = [[(integers(4, 4), integers(4, 2)) for _ in range(2)] for _ in range(4)]
            result = trainer.step(losses_of(data))
            x, y = (torch.cat([b[i] for row in data for b in row]) for i in (0, 1))
            theirs.optimizer.zero_grad()
            mse((x, y))(theirs.model).backward()  # type: ignore[no-untyped-call]
            for name, p in theirs.named.items():
                mine = result.gradient[name]
                assert mine is not None and p.grad is not None and torch.equal(mine, p.grad)
                assert mine.count_nonzero() > 0
            theirs.optimizer.step()
            after = theirs.state()
            for group in GROUPS:
                for name in group.names:
                    g = result.gradient[name]
                    assert g is not None
                    assert_judged(before[name], g, group.options, after[name], name)
                    assert_judged(before[name], g, group.options, trainer.state[name], name)


def test_average_sum_is_the_number_of_ranks_times_the_mean() -> None:
    data = losses_of(batches(4, 1, seed=0))
    mean = Trainer(mlp(), GROUPS).step(data)
    total = Trainer(mlp(), GROUPS, average="sum").step(data)
    for name, g in mean.gradient.items():
        other = total.gradient[name]
        assert g is not None and other is not None and torch.equal(other, 4 * g)
    assert total.norm == 4 * mean.norm


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("rule", ["min(1, c/(norm+eps))", "c/norm if norm>c"])
def test_clipping_takes_norm_type_and_rule(norm_type: float, rule: Any) -> None:
    """The state is that of adamw_step with the gradient times the coefficient, rounded once."""
    trainer = Trainer(mlp(), GROUPS, max_norm=0.25, norm_type=norm_type, clip_rule=rule)
    before = dict(trainer.state)
    result = trainer.step(losses_of(batches(2, 1, seed=0)))
    grads = {n: g.double().numpy() for n, g in result.gradient.items() if g is not None}
    flat = np.concatenate([g.ravel() for g in grads.values()])
    exact = float(np.abs(flat).max()) if norm_type == math.inf else math.hypot(*flat)
    assert result.norm == pytest.approx(exact, rel=(flat.size + 4) * 2.0**-53)
    eps = 1e-6 if "eps" in rule else 0.0
    assert result.coefficient == pytest.approx(0.25 / (result.norm + eps), rel=2.0**-51)
    for group in GROUPS:
        for name in group.names:
            g = torch.tensor(grads[name] * result.coefficient).float()
            expected = adamw_step(before[name], g, group.options)
            assert torch.equal(trainer.state[name].parameter, expected.parameter)
