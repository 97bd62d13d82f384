"""Cases drawn at random."""

from __future__ import annotations

from functools import partial

import pytest

from zerocheck.run.plan.draws import at_random
from zerocheck.run.plan.options import RunOptions


@pytest.mark.parametrize("features", [(), ("clip", "microbatches")])
def test_more_cases_begin_with_the_same_ones(features: tuple[str, ...]) -> None:
    options = RunOptions(implementations=("ddp",), world_sizes=(1, 2, 3), features=features)
    draw_some = partial(at_random, options, fixed={}, meshes=[(2, 2)])
    assert draw_some(40)[:10] == draw_some(10)
