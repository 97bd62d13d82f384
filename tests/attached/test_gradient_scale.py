"""The length of the whole gradient: factors are named, round-off is not called one."""

from __future__ import annotations

import math

import pytest
import torch

from zerocheck.attached.gradient_scale import NO_SCALE, Move, added, along, projected, scaled
from zerocheck.attached.step_record import StepSummary
from zerocheck.floating_point import Enclosure
from zerocheck.judge.estimate import MARGIN

GRADIENT = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def summary(ranks: int = 4, microbatches: int = 3) -> StepSummary:
    return StepSummary(
        rank=0, world_size=ranks, number=1, what="", pieces=(), options=(), before=(), after=(),
        forwards=microbatches,
    )  # fmt: skip


def seen(factor: float, sway: float = 0.003) -> tuple[float, float, float]:
    """A tensor of which each of two ranks holds half. sway: relative to the gradient."""
    length = float(GRADIENT.norm())
    whole = Enclosure(GRADIENT, torch.zeros(64, dtype=torch.float64))
    found = NO_SCALE
    for half in (slice(0, 32), slice(32, 64)):
        part = Enclosure(*(one[half] for one in whole))
        held = factor * GRADIENT[half]
        found = added(found, projected(held, part, length=length, sway=sway * length, noise=0.0))
    return found


@pytest.mark.parametrize(
    ("factor", "causes"),
    [
        (4.0, ("gradient x W",)),
        (0.25, ("gradient / W",)),
        (3.0, ("gradient x GA",)),
        (1 / 3, ("gradient / GA",)),
        (12.0, ("gradient x W x GA",)),
        (2.0, ("gradient x sqrt(W)", "gradient doubled")),
        (0.9, ("gradient scaled",)),
        (-1.0, ("gradient scaled",)),
    ],
)
def test_factors_are_named(factor: float, causes: tuple[str, ...]) -> None:
    found = scaled([seen(factor)], summary())
    assert found is not None and found.causes == causes
    assert found.observed == pytest.approx(factor) and found.bound == pytest.approx(MARGIN * 0.003)


def test_a_right_length_holds() -> None:
    assert scaled([seen(1.0, sway=0.0)], summary()) is None
    assert scaled([seen(1 + 0.99 * MARGIN * 0.003)], summary()) is None
    assert scaled([seen(1 + 1.01 * MARGIN * 0.003)], summary()) is not None


def test_copies_on_several_ranks_count_on_both_sides() -> None:
    once, twice = (scaled([seen(0.5)] * count, summary()) for count in (1, 2))
    assert once is not None and twice is not None
    assert (once.observed, once.bound) == pytest.approx((twice.observed, twice.bound))


def test_what_was_not_asked_is_not_judged() -> None:
    assert scaled([seen(2.0, sway=math.inf)], summary()) is None
    assert scaled([NO_SCALE], summary()) is None


def test_moves_across_a_gradient_are_none_along_it() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    across = torch.tensor([4.0, -3.0], dtype=torch.float64)
    assert along([Move.of(across, gradient)]) == 0
    assert along([Move.of(0.1 * gradient, gradient)]) == pytest.approx(0.5)
    assert along([Move.of(gradient, torch.zeros(2, dtype=torch.float64))]) == 5


def test_a_move_in_pieces_is_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(0)
    move, gradient = torch.randn(2, 100, dtype=torch.float64, generator=generator)
    pieces = [Move.of(*two) for two in zip(move.split(33), gradient.split(33), strict=True)]
    assert along(pieces) == pytest.approx(along([Move.of(move, gradient)]))
    assert max(one.largest for one in pieces) == float(move.abs().max())
