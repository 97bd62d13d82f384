"""Each known mistake of Muon is named, and no other, and attribution says it without names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from muon_steps import GROUP, MUON, drawn, elements, options_of, segment, step

from zerocheck import causes as bugs
from zerocheck.judge.diagnose.update import fitting
from zerocheck.optimizers.specification import Segment
from zerocheck_reference import adjusted, orthogonalized

SHAPE = (18, 6)
Update = Callable[[torch.Tensor], torch.Tensor]
KEPT = 1 - GROUP.lr * GROUP.weight_decay
RATE = GROUP.lr * adjusted(SHAPE, "original")


def _causes(found: Segment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.cause for one in fitting(MUON, [found])))


def _whole(d: torch.Tensor) -> torch.Tensor:
    return RATE * orthogonalized(d).float()


def _by_shard(d: torch.Tensor) -> torch.Tensor:
    return torch.cat([GROUP.lr * adjusted(o.shape, "original") * orthogonalized(o).float()
                      for o in d.chunk(3)])  # fmt: skip


def _by_columns(d: torch.Tensor) -> torch.Tensor:
    return torch.cat([RATE * orthogonalized(one).float() for one in d.chunk(2, 1)], 1)


PARAMETER: list[tuple[str, Update, str]] = [
    (bugs.ORTHOGONALIZED_BY_SHARD, _by_shard, ""),
    (bugs.ORTHOGONALIZED_BY_SHARD, _by_columns, "each shard of 2 along dim 1 orthogonalized alone"),
    (bugs.SCALE_OF_THE_SHARD, lambda d: _whole(d) / adjusted(SHAPE, "original"), ""),
    (
        bugs.SCALE_OF_THE_TRANSPOSED_MATRIX,
        lambda d: _whole(d) / adjusted(SHAPE, "original"),
        "the shape of the transposed matrix",
    ),
    (
        bugs.ANOTHER_ADJUSTMENT,
        lambda d: _whole(d) / RATE * GROUP.lr * adjusted(SHAPE, "match_rms_adamw"),
        "0.2 sqrt",
    ),
    (
        bugs.ORTHOGONALIZED_IN_PARTS,
        lambda d: torch.cat([RATE * orthogonalized(one).float() for one in d.chunk(3)]),
        "",
    ),
    (bugs.NOT_ORTHOGONALIZED, lambda d: RATE * d, "without orthogonalization"),
    (
        bugs.ORTHOGONALIZED_IN_ANOTHER_DTYPE,
        lambda d: RATE * orthogonalized(d, dtype=torch.float32),
        "in fp32, and not in bf16",
    ),
    (bugs.ANOTHER_NUMBER_OF_ITERATIONS, lambda d: RATE * orthogonalized(d, steps=3).float(), ""),
    (bugs.LEARNING_RATE_OF_ANOTHER_STEP, lambda d: _whole(d) * 1.5, "lr of another step"),
]


@pytest.mark.parametrize(("cause", "update", "words"), PARAMETER, ids=[one[0] for one in PARAMETER])
def test_a_wrong_parameter(cause: str, update: Update, words: str) -> None:
    options = options_of()
    p, g, b = drawn(SHAPE, 0, torch.float32)
    _, buffer = step(p, g, b, GROUP, options)
    d = g.lerp(buffer, options.momentum)
    rate = 1.5 if cause == bugs.LEARNING_RATE_OF_ANOTHER_STEP else 1.0
    after = p * (1 - rate * GROUP.lr * GROUP.weight_decay) - update(d)
    found = segment("parameter", after, elements(p, g, b, buffer), options)
    assert cause in _causes(found)
    if words and rate == 1.0:
        assert any(words in one.words for one in fitting(MUON, [found]))


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        # Of these two the direction is the same: 0.95 b + 0.05 g.
        (bugs.NESTEROV_LEFT_OUT, lambda g, b, new: new),
        (bugs.MOMENTUM_LEFT_OUT, lambda g, b, new: g),
        (bugs.MOMENTS_OF_THE_PREVIOUS_STEP, lambda g, b, new: g.lerp(b, 0.95)),
    ],
)
def test_another_input(
    cause: str, change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    options = options_of()
    p, g, b = drawn(SHAPE, 1, torch.float32)
    _, buffer = step(p, g, b, GROUP, options)
    after = p * KEPT - _whole(change(g, b, buffer))
    found = segment("parameter", after, elements(p, g, b, buffer), options)
    named = _causes(found)
    assert cause in named and len(named) <= 2


@pytest.mark.parametrize(
    ("cause", "kept"),
    [
        (bugs.WEIGHT_DECAY_MISSING, 1.0),
        (bugs.WEIGHT_DECAY_TWICE, KEPT**2),
        (bugs.WEIGHT_DECAY_BY_THE_ADJUSTED_RATE, 1 - RATE * GROUP.weight_decay),
        (bugs.WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE, 1 - GROUP.weight_decay),
    ],
)
def test_a_wrong_decay(cause: str, kept: float) -> None:
    options = options_of()
    p, g, b = drawn(SHAPE, 2, torch.float32)
    _, buffer = step(p, g, b, GROUP, options)
    after = p * kept - _whole(g.lerp(buffer, options.momentum))
    found = segment("parameter", after, elements(p, g, b, buffer), options)
    assert cause in _causes(found)


def _buffers(p: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    right = 0.95 * b + 0.05 * g
    return {
        bugs.GRADIENT_NOT_DAMPENED: 0.95 * b + g,
        bugs.MOMENTS_RESET: 0.05 * g,
        bugs.GRADIENT_WITH_THE_WRONG_SIGN: 0.95 * b - 0.05 * g,
        bugs.MOMENTUM_NORMALIZED: right / right.norm(),
        bugs.ROUNDED_TO_BF16: right.bfloat16().float(),
    }


@pytest.mark.parametrize("cause", list(_buffers(*drawn((2, 2), 0, torch.float32))))
def test_a_wrong_buffer(cause: str) -> None:
    options = options_of()
    p, g, b = drawn(SHAPE, 3, torch.float32)
    wrong = _buffers(p, g, b)[cause]
    found = segment("momentum_buffer", wrong, elements(p, g, b, wrong), options)
    assert _causes(found) == (cause,)


def test_the_fault_of_torch_in_bf16_is_named() -> None:
    options = options_of(nesterov=False)
    p, g, b = drawn(SHAPE, 4, torch.bfloat16)
    _, buffer = step(p, g, b, GROUP, options)
    found = segment("momentum_buffer", buffer, elements(p, g, b, buffer), options)
    assert _causes(found) == (bugs.MOMENTUM_NORMALIZED,)
    assert any("divided by its norm" in one.words for one in fitting(MUON, [found]))


def test_a_right_step_has_no_cause() -> None:
    for seed, nesterov in ((5, True), (6, False)):
        options = options_of(nesterov=nesterov)
        p, g, b = drawn(SHAPE, seed, torch.float32)
        after, buffer = step(p, g, b, GROUP, options)
        found = segment("parameter", after, elements(p, g, b, buffer), options)
        assert _causes(found) == ()
