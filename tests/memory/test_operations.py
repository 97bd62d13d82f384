"""Operations of a forward, against 2 per weight and token and the two products of attention."""

from __future__ import annotations

import pytest

from zerocheck.errors import UsageError
from zerocheck.memory.operations import forward_operations
from zerocheck.memory.presets import PRESETS, Architecture
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source


def by_hand(shape: Architecture, batch: int, sequence: int) -> tuple[int, int]:
    """Of a block and of the head: norms, rotations and the embedding are no products."""
    tokens = batch * sequence
    narrow = shape.key_value_heads * shape.head_width
    weights = 2 * shape.width**2 + 2 * shape.width * narrow + 3 * shape.width * shape.hidden
    attention = 2 * 2 * batch * sequence**2 * shape.width
    return 2 * tokens * weights + attention, 2 * tokens * shape.width * shape.vocabulary


@pytest.mark.parametrize(("batch", "sequence"), [(1, 64), (3, 128)])
def test_a_known_model(batch: int, sequence: int) -> None:
    setup = Setup(model="llama3-8b", batch=batch, sequence=sequence)
    found = forward_operations(source(setup.model), setup)
    block, head = by_hand(PRESETS["llama3-8b"], batch, sequence)
    assert found.blocks == (block,) * 32
    assert found.total == 32 * block + head
    assert found.share_of_blocks == 32 * block / (32 * block + head)


def test_a_model_that_takes_no_tokens_is_refused(tmp_path: object) -> None:
    setup = Setup(model="small_models:images", batch=1, sequence=4)
    with pytest.raises(UsageError, match="fails on the meta device"):
        forward_operations(source(setup.model), setup)
