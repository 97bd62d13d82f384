"""What the textbook ZeRO-1 and ZeRO-2 call, and what they share with ZeRO-3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...contract.layout import Call
from ..textbook.bucket import Named, of_one_dtype
from ..textbook.partition import Partition, aligned, split
from .writing import Calls, dtype_of


class Flat(NamedTuple):
    """A flat buffer: its elements, padding included, and its dtype."""

    elements: int
    dtype: str


def flat_of(named: Named, world_size: int) -> Flat:
    """The flat buffer that parameters of one dtype lie in."""
    first = named[0][1]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    numel = Partition(shapes, world_size, aligned(first.element_size())).numel
    return Flat(numel, dtype_of(first))


def buckets(model: nn.Module, case: Case) -> list[Flat]:
    """The buckets of ZeRO-1 and ZeRO-2, in their order."""
    later = unfrozen(case)
    last_first = list(model.named_parameters())[::-1]
    learns = [pair for pair in last_first if pair[1].requires_grad or pair[0] in later]
    found = []
    for named in of_one_dtype(learns):
        sizes = [math.prod(parameter.shape) for _, parameter in named]
        for part in split(sizes, case.sharding.bucket):
            found.append(flat_of([named[index] for index in part], case.world_size))
    return found


def scaling(calls: Calls, case: Case) -> None:
    """Ranks agree on whether the gradient overflowed."""
    if case.training.loss_scale is not None:
        calls.add("all_reduce", 1, "float32")


def clipping(calls: Calls, case: Case) -> None:
    """One norm, in fp64."""
    if case.training.clip is not None:
        calls.add("all_reduce", 1, "float64")


def zero1(model: nn.Module, case: Case) -> tuple[Call, ...]:
    """Each bucket is reduced once, after the last microbatch, and gathered after the update."""
    return _replicated(model, case, reductions=1)


def zero2(model: nn.Module, case: Case) -> tuple[Call, ...]:
    """Each bucket is reduced in each backward, always in the same order, used or not."""
    return _replicated(model, case, reductions=case.training.microbatches)


def _replicated(model: nn.Module, case: Case, *, reductions: int) -> tuple[Call, ...]:
    flats = buckets(model, case)
    calls = Calls(case)
    for step in calls.steps:
        calls.at(step, "backward")
        for _ in range(reductions):
            _each("reduce_scatter", flats, calls)
        scaling(calls, case)
        calls.at(step, "step")
        clipping(calls, case)
        _each("all_gather", flats, calls)
    return tuple(calls.done)


def _each(kind: str, flats: Sequence[Flat], calls: Calls) -> None:
    for flat in flats:
        calls.add(kind, *flat)
