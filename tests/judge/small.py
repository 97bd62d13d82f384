"""A few elements, and what ranks hold of them, written by hand: for tests of the judge's parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocheck.floating_point import BF16, FP32
from zerocheck.judge.assemble import RoleState
from zerocheck.judge.layout import Formats, ParameterLayout, ParameterPlace
from zerocheck.judge.manifest_plan import ManifestPlan
from zerocheck.judge.state import State

SIZE = 8


def layout(*, frozen: str = "", narrow: bool = False) -> ParameterLayout:
    """`a` (2,), `b` (2, 2), `c` () and an empty `d`, and one element `e`, in one group.

    frozen: a name that is not trainable; narrow: `b` is in bf16.
    """
    shapes: dict[str, tuple[int, ...]] = {"a": (2,), "b": (2, 2), "c": (), "d": (0,), "e": (1,)}
    places: list[ParameterPlace] = []
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.empty(shape).numel()
        format = BF16 if narrow and name == "b" else FP32
        group = -1 if name == frozen else 0
        places.append(ParameterPlace(name, shape, start, stop, name != frozen, group, format))
        start = stop
    assert start == SIZE
    trainable = torch.ones(SIZE, dtype=torch.bool)
    for place in places:
        trainable[place.start : place.stop] = place.trainable
    formats = Formats(((FP32, None),), SIZE)
    if narrow:
        cut = torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])
        formats = Formats(((FP32, cut[0]), (BF16, cut[1])), SIZE)
    return ParameterLayout(
        tuple(places), SIZE, {place.name: place for place in places}, trainable, {}, formats
    )


NAMES = frozenset("abcde")


def held(
    *parts: Sequence[float], absent: str = "", ranges: Sequence[Sequence[int]] = ()
) -> RoleState:
    """What each rank holds: all elements, or those of its range; absent: names without any."""
    plans = []
    whole = torch.full((SIZE,), torch.nan)
    tensors = [torch.tensor(part) for part in parts]
    for rank in range(len(parts)):
        index = torch.tensor(ranges[rank]) if ranges else None
        plans.append(ManifestPlan(index, NAMES - set(absent), frozenset(absent)))
    for tensor, plan in zip(reversed(tensors), reversed(plans), strict=True):
        plan.scatter(whole, tensor)
    return RoleState(whole, tuple(tensors), tuple(plans), ((),) * len(parts))


def state(
    parameter: Sequence[float],
    steps: Sequence[float | None] = (1.0,) * 5,
    **moments: Sequence[float],
) -> State:
    """A state that all ranks agree on."""
    flat = torch.tensor(parameter)
    return State(
        parameter=flat,
        per_rank=[flat, flat],
        moments={role: torch.tensor(values) for role, values in moments.items()},
        present=dict.fromkeys(moments, NAMES),
        steps=list(steps),
    )
