"""Local passes bit for bit against a plain loop and DDP; averages against exact rationals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zerocheck_reference import LocalPass, average, half_ulp, local_pass, round_to

float32s = st.floats(-(2.0**100), 2.0**100, width=32)


class Net(nn.Module):
    """Embedding tied to the head, attention, dropout, a buffer, an unused and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.head(self.drop(torch.relu(self.frozen(x))))
        return out


def token_loss(seed: int) -> Callable[[nn.Module], Tensor]:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(seed)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return loss


def assert_same_bits(a: Tensor | None, b: Tensor | None) -> None:
    if a is None or b is None:
        assert a is b
    else:
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("divisor", [1, 3, 4.0])
def test_local_pass_has_the_bits_of_a_plain_loop(divisor: float) -> None:
    model, replica = Net(), Net()
    for seed in range(3):
        loss = token_loss(seed)
        seen = local_pass(model, loss, loss_divisor=divisor)
        replica.zero_grad()
        plain = loss(replica)
        (plain / divisor if divisor != 1 else plain).backward()  # type: ignore[no-untyped-call]
        assert_same_bits(seen.loss, plain.detach())
        assert seen.loss.shape == () and not seen.loss.requires_grad
        expected = {n: p.grad for n, p in replica.named_parameters() if p.requires_grad}
        assert list(seen.gradients) == list(expected)
        for name, gradient in expected.items():
            assert_same_bits(seen.gradients[name], gradient)
        assert "head.weight" not in expected and "frozen.weight" not in expected
        assert seen.gradients["unused.weight"] is None
        assert all(p.grad is None for p in model.parameters())


def test_local_pass_has_the_bits_of_a_ddp_rank(tmp_path: Path) -> None:
    """One rank: the reducer copies to its buckets and divides by 1."""
    path = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=path, rank=0, world_size=1)
    try:
        replica = Net()
        wrapped = nn.parallel.DistributedDataParallel(replica, find_unused_parameters=True)
        seen = local_pass(Net(), token_loss(1), loss_divisor=3)
        (token_loss(1)(wrapped) / 3).backward()  # type: ignore[no-untyped-call]
        for name, parameter in replica.named_parameters():
            if parameter.requires_grad and seen.gradients[name] is not None:
                assert_same_bits(seen.gradients[name], parameter.grad)
    finally:
        dist.destroy_process_group()


def test_local_pass_ignores_what_was_there_and_leaves_nothing() -> None:
    model = Net()
    first = local_pass(model, token_loss(1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with torch.no_grad():
        again = local_pass(model, token_loss(1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    named = local_pass(model, token_loss(1), parameters=dict(model.named_parameters()))
    assert list(named.gradients) == list(first.gradients)
    for name, gradient in first.gradients.items():
        assert_same_bits(gradient, again.gradients[name])
        assert_same_bits(gradient, named.gradients[name])

    def fails(model: nn.Module) -> Tensor:
        token_loss(1)(model).backward()  # type: ignore[no-untyped-call]
        raise RuntimeError("user's own")

    for mapping in (None, dict(model.named_parameters())):
        with pytest.raises(RuntimeError, match="user's own"):
            local_pass(model, fails, parameters=mapping)
    assert all(p.grad is None for p in model.parameters())


def test_local_pass_refusals() -> None:
    model = nn.Linear(2, 2)
    refused: list[tuple[Callable[[nn.Module], object], str]] = [
        (lambda m: 1.0, "a float"),
        (lambda m: m(torch.ones(1, 2)), r"shape \(1, 2\)"),
        (lambda m: torch.tensor(1.0), "depends on no parameter"),
    ]
    for loss, message in refused:
        with pytest.raises(ValueError, match=message):
            local_pass(model, loss)  # type: ignore[arg-type]
    for divisor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss_divisor"):
            local_pass(model, lambda m: m(torch.ones(2)).sum(), loss_divisor=divisor)
    sparse = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="sparse_coo"):
        local_pass(sparse, lambda m: m(torch.tensor([1])).sum())


def passes_of(values: list[list[float | None]], dtype: torch.dtype) -> list[list[LocalPass]]:
    return [
        [
            LocalPass(torch.zeros(()), {"w": None if x is None else torch.tensor([x], dtype=dtype)})
            for x in row
        ]
        for row in values
    ]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(
            st.lists(st.none() | float32s, min_size=m, max_size=m), min_size=1, max_size=5
        )
    ),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from(["loss", "gradient"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_average_in_exact_rationals(
    values: list[list[float | None]],
    over: Literal["mean", "sum"],
    divide: Literal["loss", "gradient"],
    dtype: torch.dtype,
) -> None:
    """K terms in float64 are K - 1 sums and a quotient, K 2**-53 sum |g|, then one rounding."""
    passes = passes_of(values, torch.float32)
    out = average(passes, average=over, divide=divide, dtype=dtype)["w"]
    terms = [Fraction(g) for row in values for x in row if x is not None for g in [x]]
    if not terms:
        assert out is None
        return
    assert out is not None and out.dtype == dtype and out.shape == (1,)
    count = (len(values) if over == "mean" else 1) * (len(values[0]) if divide == "gradient" else 1)
    exact = sum(terms, Fraction(0)) / count
    inner = len(terms) * Fraction(2) ** -53 * sum(map(abs, terms), Fraction(0)) / count
    inner += Fraction(2) ** -1074
    last = Fraction(0)
    if dtype != torch.float64:
        edge = torch.tensor([float(abs(exact) + inner)], dtype=torch.float64)
        last = Fraction(half_ulp(edge, dtype).item())
    assert abs(Fraction(out.item()) - exact) <= (inner + last) * Fraction(1_000_001, 1_000_000)


def test_average_by_hand() -> None:
    passes = passes_of([[1.0, 2.0], [3.0, 4.0], [None, 5.0]], torch.float32)
    for over, divide, value in (
        ("mean", "loss", 5.0),
        ("sum", "loss", 15.0),
        ("mean", "gradient", 2.5),
        ("sum", "gradient", 7.5),
    ):
        out = average(passes, average=over, divide=divide)["w"]  # type: ignore[arg-type]
        assert out is not None and out.dtype == torch.float32 and out.item() == value


def test_a_single_term_is_divided_in_float64_too() -> None:
    out = average(passes_of([[1.0], [None], [None]], torch.float32), dtype=torch.float64)["w"]
    assert out is not None and out.item() == 1 / 3


def test_average_rounds_once_to_the_dtype_of_the_gradients() -> None:
    """1 + 2**-8 + 2**-40: in bfloat16 just above a tie, in float32 the tie itself."""
    exact = 1 + 2.0**-8 + 2.0**-40
    passes = passes_of([[1.0], [2.0**-8], [2.0**-40]], torch.bfloat16)
    out = average(passes, average="sum")["w"]
    assert out is not None and out.dtype == torch.bfloat16 and out.item() == 1 + 2.0**-7
    expected = round_to(torch.tensor([exact], dtype=torch.float64), torch.bfloat16)
    assert torch.equal(out, expected)
    # Large terms that cancel: float32 sums would lose the 1.
    out = average(passes_of([[1e10, 1.0], [-1e10, 0.0]], torch.float32), average="sum")["w"]
    assert out is not None and out.item() == 1.0


def test_unused_parameters() -> None:
    passes = passes_of([[None], [None]], torch.float32)
    like = {"w": nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))}
    assert average(passes)["w"] is None
    zeros = average(passes, unused="zero", like=like)["w"]
    assert zeros is not None and zeros.dtype == torch.bfloat16 and not zeros.requires_grad
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16))
    zeros = average(passes, unused="zero", like=like, dtype=torch.float32)["w"]
    assert zeros is not None and zeros.dtype == torch.float32
    with pytest.raises(ValueError, match="like has no 'w'"):
        average(passes, unused="zero")
    # Used somewhere: the shape is known, and None counts as zero under either word.
    for unused in ("skip", "zero"):
        out = average(passes_of([[None], [4.0]], torch.float32), unused=unused)["w"]
        assert out is not None and out.item() == 2.0


def test_average_refusals() -> None:
    one = passes_of([[1.0]], torch.float32)
    ragged_ones: list[list[list[LocalPass]]] = [[], [[]], [*one, []], [*one, [*one[0], *one[0]]]]
    for ragged in ragged_ones:
        with pytest.raises(ValueError, match="the same number of microbatches"):
            average(ragged)
    other = [[LocalPass(torch.zeros(()), {"v": None})]]
    with pytest.raises(ValueError, match="v, w: in some passes only"):
        average([*one, *other])
    wide = [[LocalPass(torch.zeros(()), {"w": torch.ones(2)})]]
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\)"):
        average([*one, *wide])
    with pytest.raises(ValueError, match="average is 'meen'; did you mean 'mean'"):
        average(one, average="meen")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divide is 'lost'; did you mean 'loss'"):
        average(one, divide="lost")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unused is None"):
        average(one, unused=None)  # type: ignore[arg-type]


def test_weight_divisor_and_scale_are_applied_in_this_order() -> None:
    parameter = nn.Linear(3, 1)
    x = torch.tensor([[0.3, -1.7, 2.9]])

    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    value = loss(parameter)
    (((value * 0.7) / 3) * 1024.0).backward()
    expected = parameter.weight.grad
    assert expected is not None
    found = local_pass(parameter, loss, loss_weight=0.7, loss_divisor=3, loss_scale=1024.0)
    assert torch.equal(found.loss, value.detach())
    assert torch.equal(found.gradients["weight"], expected)


@pytest.mark.parametrize("name", ["loss_weight", "loss_divisor", "loss_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_of_the_loss_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        local_pass(nn.Linear(1, 1), lambda model: model(torch.ones(1)).sum(), **{name: value})


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_weight_divisor_and_scale_multiply_the_gradients_and_not_the_loss(factor: float) -> None:
    model = nn.Linear(3, 1)
    x = torch.tensor([[1.0, -2.0, 3.0]])

    def run(**given: float) -> tuple[float, Tensor]:
        found = local_pass(model, lambda m: m(x).sum(), **given)
        gradient = found.gradients["weight"]
        assert gradient is not None
        return float(found.loss), gradient

    loss, gradient = run()
    for name, times in (("weight", factor), ("divisor", 1 / factor), ("scale", factor)):
        found = run(**{f"loss_{name}": factor})
        assert found[0] == loss and torch.equal(found[1], gradient * times), name
