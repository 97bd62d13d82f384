"""Masked targets, weights by tokens, and the microbatch that overflows."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace

from zerocheck.case.schema import Case, Data, Model, Training
from zerocheck.models.batches import IGNORED, batch, carried_seed, loss_of, overflows, weight

WORLD, MICROBATCHES = 3, 2


def _case(seed: int = 0, **data: object) -> Case:
    return Case(
        mesh=(WORLD,),
        seed=seed,
        model=Model(stem="embedding", inputs=7, outputs=5),
        data=Data(batch=2, length=3, **data),  # type: ignore[arg-type]
        training=Training(steps=3, microbatches=MICROBATCHES, loss_scale=4.0, overflow=1),
    )


def _places() -> list[dict[str, int]]:
    return [
        {"step": 1, "rank": rank, "microbatch": number}
        for rank in range(WORLD)
        for number in range(MICROBATCHES)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_weighted_mean_of_means_is_the_mean_by_token(seed: int) -> None:
    case = _case(seed, masked=True)
    torch.manual_seed(seed)
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    count, total, mean = 0, torch.zeros((), dtype=torch.float64), 0.0
    tokens = []
    for place in _places():
        target = batch(case, **place).target
        kept = target != IGNORED
        tokens.append(int(kept.sum()))
        count += tokens[-1]
        chosen = logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1))[..., 0]
        total -= chosen[kept].sum()
        mean += float(loss_of(case)(logits.float(), target)) * weight(case, **place)
        assert weight(case, **place) == float(Fraction(tokens[-1] * 6, 1)) / sum(
            int((batch(case, **other).target != IGNORED).sum()) for other in _places()
        )
    assert mean / len(tokens) == pytest.approx(float(total / count), rel=1e-6)
    assert min(tokens) >= 1
    assert all(one != other for one, other in pairwise(tokens))


def test_without_masks_every_weight_is_1() -> None:
    case = _case()
    assert {weight(case, **place) for place in _places()} == {1.0}
    assert not any(bool((batch(case, **place).target == IGNORED).any()) for place in _places())


@pytest.mark.parametrize("seed", range(7))
def test_one_microbatch_of_one_rank_overflows(seed: int) -> None:
    case = _case(seed)
    assert sum(overflows(case, **place) for place in _places()) == 1
    assert not any(overflows(case, **{**place, "step": 0}) for place in _places())


def test_carried_seeds_differ_by_rank() -> None:
    case = replace(_case(), mesh=(1024,))
    assert len({carried_seed(case, rank) for rank in range(1024)}) == 1024
