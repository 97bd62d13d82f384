"""The length of the whole gradient: factors are named, round-off is not called one."""

from __future__ import annotations

import math

import pytest
import torch
from summaries import summary

from zerocheck.attached.verdict.gradient_scale import (
    NO_SCALE,
    Move,
    added,
    along,
    projected,
    scaled,
)
from zerocheck.contract.semantics import Semantics
from zerocheck.floating_point import Enclosure
from zerocheck.judge.estimate import MARGIN

GRADIENT = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOLD = summary(world_size=4, forwards=3)


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
    found = scaled([{"a": seen(factor)}], TOLD, Semantics())
    assert found is not None and found.causes == causes
    assert found.observed == pytest.approx(factor) and found.bound == pytest.approx(MARGIN * 0.003)


@pytest.mark.parametrize(
    ("factor", "average", "words"),
    [
        (4.0, "mean", "4 times too large: summed over 4 ranks, not averaged"),
        (4.0, "sum", "4 times too large: multiplied by the number of ranks"),
        (0.25, "mean", "4 times too small: divided by the number of ranks twice"),
        (0.25, "sum", "4 times too small: averaged over 4 ranks, not summed"),
        (12.0, "mean", "12 times too large: summed over 4 ranks and 3 microbatches, not averaged"),
        (1 / 3, "mean", "3 times too small: divided by the number of microbatches twice"),
        (0.9, "mean", "0.9 times what it must be"),
    ],
)
def test_factors_in_words(factor: float, average: str, words: str) -> None:
    semantics = Semantics(average=average)  # type: ignore[arg-type]
    violation = scaled([{"a": seen(factor)}], TOLD, semantics)
    assert violation is not None
    assert violation.explanation == f"the gradient as a whole is {words}"


def test_a_right_length_holds() -> None:
    assert scaled([{"a": seen(1.0, sway=0.0)}], TOLD, Semantics()) is None
    assert scaled([{"a": seen(1 + 0.99 * MARGIN * 0.003)}], TOLD, Semantics()) is None
    assert scaled([{"a": seen(1 + 1.01 * MARGIN * 0.003)}], TOLD, Semantics()) is not None


def test_copies_on_several_ranks_count_on_both_sides() -> None:
    once, twice = (scaled([{"a": seen(0.5)}] * count, TOLD, Semantics()) for count in (1, 2))
    assert once is not None and twice is not None
    assert (once.observed, once.bound) == pytest.approx((twice.observed, twice.bound))


def test_what_was_not_asked_is_not_judged() -> None:
    assert scaled([{"a": seen(2.0, sway=math.inf)}], TOLD, Semantics()) is None
    assert scaled([{"a": NO_SCALE}], TOLD, Semantics()) is None


def test_moves_across_a_gradient_are_none_along_it() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    across = torch.tensor([4.0, -3.0], dtype=torch.float64)
    assert along([Move.of(across, gradient)]) == 0
    assert along([Move.of(0.1 * gradient, gradient)]) == pytest.approx(0.5)
    assert along([Move.of(0 * gradient, gradient)], 0.01) == pytest.approx(0.01 * 337**0.5 / 5)
    assert along([Move.of(gradient, torch.zeros(2, dtype=torch.float64))]) == 5


def test_a_move_in_pieces_is_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(0)
    move, gradient = torch.randn(2, 100, dtype=torch.float64, generator=generator)
    pieces = [Move.of(*two) for two in zip(move.split(33), gradient.split(33), strict=True)]
    assert along(pieces) == pytest.approx(along([Move.of(move, gradient)]))
    assert max(one.largest for one in pieces) == float(move.abs().max())


def test_tensors_of_one_kind_that_are_off_are_told_from_the_rest() -> None:
    """A coarse embedding hides them in the whole gradient."""
    coarse, wrong = seen(1.0, sway=0.2), seen(4.0)
    each = {
        "embedding": coarse,
        "blocks.0.expert": wrong,
        "blocks.11.expert": wrong,
        "head": seen(1),
    }
    found = scaled([each], TOLD, Semantics())
    assert found is not None and found.causes == ("gradient x W",)
    assert found.tensors == ("blocks.0.expert", "blocks.11.expert")
    assert "gradient of blocks.0.expert and 1 more as a whole is 4 times" in found.explanation
    assert scaled([{**each, "head": seen(0.25)}], TOLD, Semantics()) is not None
    assert scaled([{"embedding": coarse, "head": seen(1)}], TOLD, Semantics()) is None
