"""The bounds of Muon enclose what torch's kernels do, and kernels that order products otherwise."""

from __future__ import annotations

import itertools

import pytest
import torch
from muon_steps import GROUP, MUON, drawn, elements, options_of, scalars, step

from zerocheck.judge.compare import compare
from zerocheck.optimizers.specification import Reading

SHAPES = ((3, 5), (8, 8), (16, 4), (1, 7), (7, 1), (32, 64), (48, 13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_steps_of_torch_are_inside(dtype: torch.dtype, transposed: bool) -> None:
    shares: dict[str, float] = {}
    forms = [(True, "original"), (False, "match_rms_adamw")]
    for number, (shape, (nesterov, adjustment)) in enumerate(itertools.product(SHAPES, forms)):
        if dtype == torch.bfloat16 and not nesterov:
            continue  # reports/findings/muon-momentum-in-bf16.md
        options = options_of(nesterov=nesterov, adjustment=adjustment)
        p, g, b = drawn(shape, number, dtype)
        if transposed:
            p, g, b = (one.t().contiguous().t() for one in (p, g, b))
        after, buffer = step(p, g, b, GROUP, options)
        made = elements(p, g, b, buffer)
        observed = {"parameter": after.double().reshape(-1), **made.new}
        for role, enclosure in MUON.enclosures(made, scalars(options)):
            share, misfit = compare(observed[role], enclosure)
            assert misfit is None, (shape, role, share)
            shares[role] = max(share, shares.get(role, 0.0))
    assert min(shares.values()) > 0.4, shares


def _by_columns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y, summed over the inner dim in two halves, each rounded, as of two ranks."""
    half = x.shape[1] // 2
    return x[:, :half] @ y[:half] + x[:, half:] @ y[half:]


def _sharded(d: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz of a matrix whose columns two ranks hold."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = d.bfloat16()
    half = x.shape[1] // 2
    norm = (x[:, :half].norm().square() + x[:, half:].norm().square()).sqrt()
    x = x / norm
    for _ in range(5):
        gram = _by_columns(x, x.T)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 8), (6, 40), (32, 64), (60, 128)], ids=str)
def test_other_kernels_are_inside_of_the_estimate_alone(shape: tuple[int, int]) -> None:
    options = options_of()
    outside = 0
    for seed in range(20):
        p, g, b = drawn(shape, seed, torch.float32)
        buffer = b.lerp(g, 1 - options.momentum)
        update = _sharded(g.lerp(buffer, options.momentum)).float()
        after = p * (1 - GROUP.lr * GROUP.weight_decay) - GROUP.lr * update
        made = elements(p, g, b, buffer)
        wanted: dict[Reading, bool] = {}
        for reading in MUON.readings:
            enclosure = dict(MUON.enclosures(made, scalars(options, reading)))["parameter"]
            wanted[reading] = compare(after.double().reshape(-1), enclosure)[1] is None
        assert wanted["estimated"], (shape, seed)
        outside += not wanted["same kernels"]
    assert outside > 15


def test_a_wrong_update_is_outside_of_the_estimate_too() -> None:
    options = options_of()
    p, g, b = drawn((16, 24), 0, torch.float32)
    after, buffer = step(p, g, b, GROUP, options)
    made = elements(p, g, b, buffer)
    enclosure = dict(MUON.enclosures(made, scalars(options, "estimated")))["parameter"]
    update = p * (1 - GROUP.lr * GROUP.weight_decay) - after
    for factor in (0.8, 1.25, 2.0):
        wrong = p * (1 - GROUP.lr * GROUP.weight_decay) - factor * update
        assert compare(wrong.double().reshape(-1), enclosure)[1] is not None, factor


def test_the_gradient_is_recovered_from_the_buffer() -> None:
    options = options_of()
    p, g, b = drawn((5, 9), 3, torch.float32)
    _, buffer = step(p, g, b, GROUP, options)
    made = elements(p, g, b, buffer)
    found = MUON.recovered(made.old, made.new, scalars(options), made.format)
    assert bool(((found.middle - made.gradient).abs() <= found.error).all())
    assert float(found.error.max()) < 1e-4
