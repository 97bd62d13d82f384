"""docs/bounds.md says of the bounds what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zerocheck import floating_point
from zerocheck.floating_point import Format
from zerocheck.judge import bounds
from zerocheck.optimizers.adamw import bounds as adamw

PAGE = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text(encoding="utf-8")


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose first header that is."""
    lines = PAGE.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.mark.parametrize("row", rows("ranks"))
def test_roundings_of_a_reduction(row: list[str]) -> None:
    ranks, microbatches, once, each = map(int, row)
    for accumulate, wanted in (("local", once), ("reduce_each", each)):
        assert wanted == bounds.gradient_roundings(
            world_size=ranks,
            microbatches=microbatches,
            average="mean",
            divide="loss",
            accumulate=accumulate,
        )


@pytest.mark.parametrize("row", rows("format"))
def test_formats(row: list[str]) -> None:
    name, *powers = row
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    u, eta = (2.0 ** int(power.removeprefix("2^")) for power in powers)
    assert (Format.of(dtype).u, Format.of(dtype).eta) == (u, eta)


def test_what_the_formulas_count() -> None:
    """Of 1 and 1: the page's bound, and the code's."""
    one = torch.ones(1, dtype=torch.float64)
    s = adamw.scalars(
        lr=0.5, beta1=0.5, beta2=0.5, eps=0.0, weight_decay=0.5, step=1, reading="double"
    )
    u, h = floating_point.U, floating_point.U
    moment = float(adamw.exp_avg(one, one, s).bound)
    assert moment == pytest.approx(u * (2 * 0.5 + 2 * 0.5) + h, rel=1e-5)
    second = float(adamw.exp_avg_sq(one, one, s).bound)
    assert second == pytest.approx(u * (2 * 0.5 + 3 * 0.5) + h, rel=1e-5)
    update = 0.5 / 0.5 / (1 / 0.5) ** 0.5
    assert re.search(r"u \(2 \|p \(1 - lr wd\)\| \+ 7 \|update\|\)", PAGE)
    parameter = float(adamw.parameter(one, one, one, s).bound)
    # p' is 0.75 - 0.71: its own spacing is smaller than that of 1, by the width of the bound.
    least = u * (2 * 0.75 + 7 * update)
    assert least <= parameter <= least + h
