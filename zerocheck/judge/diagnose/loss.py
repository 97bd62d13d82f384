"""Known causes of wrong losses, each computed and compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from ... import causes as bugs
from ..flat import NOBODY, FlatBuffer
from .placement import moved, orders

Losses = Sequence[Sequence[float]]


def same(observed: Losses, expected: Losses, tolerance: float = 0.0) -> bool:
    """Return True if every observed loss is the expected one, NaN and infinity included.

    tolerance: tolerance, where kernels are not the reference's.
    """
    return all(
        len(actual) == len(wanted)
        and all(equal(a, b, tolerance) for a, b in zip(actual, wanted, strict=True))
        for actual, wanted in zip(observed, expected, strict=True)
    )


def equal(a: float, b: float, tolerance: float = 0.0) -> bool:
    """Return True for equal numbers, up to `tolerance`, or if both are NaN."""
    return a == b or abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b))


def causes(
    observed: Losses,
    expected: Losses,
    evaluated: Losses | None,
    rng_after: Sequence[Sequence[str]] = (),
    rng_after_elsewhere: Collection[str] = (),
) -> tuple[str, ...]:
    """Find all causes that explain every wrong loss.

    evaluated: the losses in evaluation mode; rng_after: per rank a hash of the random state at the
    end of each forward; rng_after_elsewhere: those of other steps.
    """
    wrong = [
        (rank, number)
        for rank, (actual, wanted) in enumerate(zip(observed, expected, strict=True))
        for number, (a, b) in enumerate(zip(actual, wanted, strict=False))
        if not equal(a, b)
    ]
    if not wrong:
        return ()
    found = []
    by_rank = [set(losses) for losses in expected]
    if all(observed[rank][number] in by_rank[rank] for rank, number in wrong):
        found.append(bugs.SAMPLES_OF_ANOTHER_MICROBATCH)
    others = [set().union(*(by_rank[:rank] + by_rank[rank + 1 :])) for rank in range(len(by_rank))]
    if all(observed[rank][number] in others[rank] for rank, number in wrong):
        found.append(bugs.SAMPLES_OF_ANOTHER_RANK)
    if evaluated is not None and all(
        observed[rank][number] == evaluated[rank][number] for rank, number in wrong
    ):
        found.append(bugs.EVALUATION_MODE)
    if not found and rng_after and _alike(wrong, rng_after, rng_after_elsewhere):
        found.append(bugs.SEED_FOR_ALL)
    return tuple(found)


def seeded_alike(rng_after: Sequence[Sequence[str]]) -> bool:
    """Return True if every forward's final random state is also that of another rank."""
    every = [
        (rank, number) for rank, hashes in enumerate(rng_after) for number in range(len(hashes))
    ]
    return bool(every) and _alike(every, rng_after)


def _alike(
    wrong: Sequence[tuple[int, int]],
    rng_after: Sequence[Sequence[str]],
    elsewhere: Collection[str] = (),
) -> bool:
    """Return True if every wrong forward's final random state is also that of another one."""
    return all(
        number < len(rng_after[rank])
        and (
            rng_after[rank][number] in elsewhere
            or any(
                rng_after[rank][number] in other for r, other in enumerate(rng_after) if r != rank
            )
        )
        for rank, number in wrong
    )


Replay = Callable[[torch.Tensor, int], Losses]
"""replay(parameters, ranks) -> the losses of the first ranks with other parameters."""


def changed_parameters(
    observed: Losses, parameters: torch.Tensor, buffers: Sequence[FlatBuffer], replay: Replay
) -> dict[str, str]:
    """Return what each cause says, if the losses are those of parameters changed in transit.

    parameters: the flat vector; buffers: those that are sharded. One rank is replayed first, since
    it rules out nearly all.
    """
    found: dict[str, str] = {}
    for name, words, changed in _on_their_way(len(observed), parameters, buffers):
        if all(same(observed[:ranks], replay(changed, ranks)) for ranks in (1, len(observed))):
            found.setdefault(name, words)
    return found


def _on_their_way(
    world: int, parameters: torch.Tensor, buffers: Sequence[FlatBuffer]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Iterate over (cause, words, the parameters that ranks would have computed with)."""
    yield bugs.COPIES_ROUNDED_TO_BF16, "all are rounded to bf16", parameters.bfloat16().float()
    for name, words, order in orders(world) if buffers else ():
        places = moved(len(parameters), buffers, lambda one, order=order: one.shards[order])  # type: ignore[misc]
        yield name, words, torch.where(places != NOBODY, parameters[places], 0.0)
