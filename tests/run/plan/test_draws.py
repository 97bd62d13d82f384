"""Cases drawn at random."""

from __future__ import annotations

from functools import partial

import pytest

from zerocheck.case.features import features as features_of
from zerocheck.run.plan.draws import NEEDED, at_random, complete
from zerocheck.run.plan.options import RunOptions


@pytest.mark.parametrize("features", [(), ("clip", "microbatches")])
def test_more_cases_begin_with_the_same_ones(features: tuple[str, ...]) -> None:
    options = RunOptions(implementations=("ddp",), world_sizes=(1, 2, 3), features=features)
    draw_some = partial(at_random, options, fixed={}, meshes=[(2, 2)])
    assert draw_some(40)[:10] == draw_some(10)


def test_a_few_cases_are_completed() -> None:
    options = RunOptions(implementations=("fsdp2",), world_sizes=(2, 4))
    found = at_random(options, 12, {}, [(2, 2)])[:8]
    complete(found, options, {}, [(2, 2), (2, 1)])
    assert len(found) == 8
    for needed in NEEDED:
        names = [set(features_of(case)) for case in found]
        assert any(needed.features <= has and not needed.without & has for has in names)


def test_meshes_are_not_completed_where_there_are_none() -> None:
    options = RunOptions(implementations=("zero1",), world_sizes=(2, 4))
    found = at_random(options, 12, {}, [])
    complete(found, options, {}, [])
    assert not any("two-axes" in features_of(case) for case in found)


def test_what_is_fixed_otherwise_is_not_completed() -> None:
    """No overflow in a case for code without a loss scale, and no error for want of one."""
    options = RunOptions(implementations=("fsdp2",), world_sizes=(2, 4))
    fixed = {"training": {"loss_scale": None}}
    found = at_random(options, 12, fixed, [(2, 2)])[:8]
    complete(found, options, fixed, [(2, 2)])
    assert any({"clip-tight", "two-axes"} <= set(features_of(case)) for case in found)
    assert all(case.training.loss_scale is None for case in found)
