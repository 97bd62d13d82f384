"""Features of a case: what it has, and what only stands in its fields."""

from __future__ import annotations

import pytest

from zerocheck.case.features import features
from zerocheck.case.schema import Block, Case, Model

SPARE = Block(kind="conv", gain=True, transposed=True, bias=False, dropout=0.5, dtype="bf16")


@pytest.mark.parametrize("name", ["block-conv", "parameter-0d", "no-bias", "dropout"])
def test_a_block_that_no_forward_calls_exercises_nothing_but_that(name: str) -> None:
    blocks = (Block(kind="mlp"), SPARE)
    assert name in features(Case(model=Model(blocks=blocks)))
    idle = features(Case(model=Model(blocks=blocks, calls=(0,))))
    assert name not in idle
    assert {"unused", "block-mlp"} <= set(idle)
