"""Provenance of the parameters behind a wrong loss: a forward with others than the updated ones.

Parameters that are sharded are not seen whole before they are used, so that the loss alone shows
them. Other parameters are looked for by computing the loss with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, log2
from typing import NamedTuple

import torch

from ..flat import NOBODY, FlatBuffer
from ..layout import ParameterLayout
from .places import ranks_words
from .values import ENOUGH

Losses = Sequence[Sequence[float]]
WHOLE = "every module"
"""Name of all modules, next to those of single ones."""
MOST_TENSORS = 64
"""Tensors that are taken one by one from the step before, if a model has no more. Modules too."""


class OtherParameters(NamedTuple):
    """Parameters that ranks may have computed with."""

    words: str
    """Continuation of "ranks 0 and 1 compute with ..."."""
    per_rank: Sequence[torch.Tensor]
    """Flat vector of each rank."""


def computed_with(
    observed: Losses,
    expected: Losses,
    others: Iterator[OtherParameters],
    replay: Callable[[Sequence[torch.Tensor]], Losses],
    equal: Callable[[float, float], bool],
    tolerance: float = 0.0,
) -> str:
    """Return the parameters that wrong losses were computed with, as one sentence.

    Args:
        observed: losses, [rank][microbatch].
        expected: losses of the right parameters.
        others: parameters that are tried, until those of every wrong rank are found.
        replay: computes the losses of the first ranks, given the parameters of each.
        equal: comparison of two losses.
        tolerance: that of the comparison. A loss within it says as much as it is nearer to the
            observed loss than the right one is: with n parameters tried, log2(n) + ENOUGH bits.
    """

    def same(one: Sequence[float], other: Sequence[float]) -> bool:
        return len(one) == len(other) and all(map(equal, one, other))

    left = [r for r, losses in enumerate(observed) if not same(losses, expected[r])]
    wrong = len(left)
    parts = []
    for tried, other in enumerate(others, 1):
        needed = log2(tried) + ENOUGH
        clear = [r for r in left if _bits(observed[r], expected[r], tolerance) > needed]
        if not clear:
            break
        first = clear[0] + 1
        if not same(observed[first - 1], replay(other.per_rank[:first])[first - 1]):
            continue
        made = replay(other.per_rank)
        found = [rank for rank in clear if same(observed[rank], made[rank])]
        left = [rank for rank in left if rank not in found]
        who = "every rank computes" if len(found) == len(observed) else ranks_words(found)
        verb = "" if len(found) == len(observed) else " computes" if len(found) == 1 else " compute"
        parts.append(f"{who}{verb} with {other.words}")
    if parts and left:
        parts.append(f"the losses of {len(left)} of {wrong} ranks remain unexplained")
    return "; ".join(parts)


def _bits(observed: Sequence[float], expected: Sequence[float], tolerance: float) -> float:
    """Return the bits by which losses that fit say more than chance; infinite for equal bits."""
    if not tolerance:
        return inf
    apart = [abs(one - other) / tolerance for one, other in zip(observed, expected, strict=False)]
    return sum(log2(one) if one > 1 else 0.0 for one in apart)


def other_parameters(
    per_rank: Sequence[torch.Tensor],
    earlier: Sequence[Sequence[torch.Tensor]],
    start: torch.Tensor,
    buffers: Sequence[FlatBuffer],
    layout: ParameterLayout,
) -> Iterator[OtherParameters]:
    """Iterate over parameters that ranks may have computed with.

    Args:
        per_rank: the right ones.
        earlier: those of earlier steps, the step before first.
        start: those of the model as it was built.
        buffers: flat buffers that are sharded.
        layout: of the flat vectors.
    """
    world = len(per_rank)
    for ago, parameters in enumerate(earlier, 1):
        yield OtherParameters(f"the parameters of {steps_before(ago)}", parameters)
    yield OtherParameters("the parameters of the model as it was built", [start] * world)
    for words, made in (("truncated to bf16", _truncated), ("negated", torch.neg)):
        yield OtherParameters(f"the parameters {words}", [made(p) for p in per_rank])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rounded = [p.to(dtype).to(p.dtype) for p in per_rank]
        yield OtherParameters(f"the parameters rounded to {name}", rounded)
    for words, order in _orders(world) if buffers else ():
        yield OtherParameters(
            f"the parameters in another order: {words}",
            [_reordered(p, buffers, order) for p in per_rank],
        )
    for rank in range(world) if buffers else ():
        yield OtherParameters(
            f"the parameters, but 0 in the shard of rank {rank}",
            [_reordered(p, buffers, [n if n != rank else NOBODY for n in range(world)])
             for p in per_rank],
        )  # fmt: skip
    if earlier and len(layout.places) <= MOST_TENSORS:
        for place in layout.places:
            mixed = [p.clone() for p in per_rank]
            for one, old in zip(mixed, earlier[0], strict=True):
                one[place.start : place.stop] = old[place.start : place.stop]
            yield OtherParameters(f"{place.name} of the step before", mixed)
    for ago, module, parts in with_a_module_of(per_rank, earlier, layout):
        if module == WHOLE:
            continue  # the first that were tried
        yield OtherParameters(f"the parameters of {module} of {steps_before(ago)}", parts)


def with_a_module_of(
    per_rank: Sequence[torch.Tensor],
    earlier: Sequence[Sequence[torch.Tensor]],
    layout: ParameterLayout,
) -> Iterator[tuple[int, str, Sequence[torch.Tensor]]]:
    """Iterate over (steps ago, module, parameters in which it has those of that step).

    It alone, everything but it, and every module.
    """
    modules = layout.modules()
    for ago, parameters in enumerate(earlier if len(modules) <= MOST_TENSORS else (), 1):
        for module, slices in modules.items():
            alone = [p.clone() for p in per_rank]
            others = [old.clone() for old in parameters]
            for place in slices:
                for rank, old in enumerate(parameters):
                    alone[rank][place] = old[place]
                    others[rank][place] = per_rank[rank][place]
            yield ago, module, alone
            yield ago, f"everything but {module}", others
        yield ago, WHOLE, parameters


def steps_before(ago: int) -> str:
    """Return "the step before" for 1, else "3 steps before"."""
    return "the step before" if ago == 1 else f"{ago} steps before"


def _truncated(parameters: torch.Tensor) -> torch.Tensor:
    return (parameters.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _orders(world: int) -> Iterator[tuple[str, list[int]]]:
    """Iterate over (words, order): order[rank] is the rank whose shard stands in its place."""
    ranks = list(range(world))
    for other in ranks:
        for one in ranks[:other]:
            order = list(ranks)
            order[one], order[other] = other, one
            yield f"the shards of ranks {one} and {other} have changed places", order
    for by in range(1, world):
        words = f"the shard of rank r + {by} (modulo {world}) is in the place of that of rank r"
        yield words, [(rank + by) % world for rank in ranks]
    if world > 10:
        yield "shards are in the order of ranks as text (0, 1, 10, 2)", sorted(ranks, key=str)
    for one in ranks:
        yield f"the shard of rank {one} is in every place", [one] * world


def _reordered(
    parameters: torch.Tensor, buffers: Sequence[FlatBuffer], order: Sequence[int]
) -> torch.Tensor:
    """Return parameters with the shards of flat buffers in another order; 0 for NOBODY."""
    made = parameters.clone()
    for buffer in buffers:
        for into, of in enumerate(order):
            places = buffer.shards[into]
            inside = places != NOBODY
            given = buffer.shards[max(of, 0)][inside]
            values = torch.where(given == NOBODY, 0.0, parameters[given.clamp(min=0)])
            made[places[inside]] = values if of != NOBODY else torch.zeros_like(values)
    return made
