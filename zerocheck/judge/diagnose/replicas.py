"""Causes of a wrong gradient of R replicas of S ranks: a sum or division missing over an axis."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch

from ... import causes as bugs
from ..pieces import Enclosing
from .evidence import Candidate, Evidence, enclosed_sum, times


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over the causes on a mesh with a replicate axis; none without it."""
    if not evidence.case.axes.has("replicate"):
        return
    yield from _scaled(evidence)
    yield from _one_axis_only(evidence)
    yield from _last_microbatch(evidence)


def _scaled(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient with a division left out, or made twice, over one axis."""
    mesh = evidence.case.axes
    for letter, number, other, over, under in (
        ("R", mesh.size("replicate"), "shard", bugs.GRADIENT_TIMES_R, bugs.GRADIENT_OVER_R),
        ("S", mesh.size("shard"), "replicate", bugs.GRADIENT_TIMES_S, bugs.GRADIENT_OVER_S),
    ):
        if number == 1:
            continue
        yield Candidate(
            over,
            f"the gradient is {letter} = {number} times too large: what is summed over both axes "
            f"is divided by the size of the {other} axis alone",
            [times(evidence, number)],
        )
        yield Candidate(
            under,
            f"the gradient is {letter} = {number} times too small: it is divided by that twice",
            [times(evidence, 1 / number)],
        )


def _one_axis_only(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient reduced only within each replica, or only across replicas."""
    mesh = evidence.case.axes
    replicas, shards, world = mesh.size("replicate"), mesh.size("shard"), mesh.world_size
    for name, words, summands, missing in (
        (
            bugs.NOT_REDUCED_OVER_REPLICAS,
            f"each replica of {shards} ranks has a gradient of its own: it was never reduced over "
            "the replicate axis",
            [mesh.group(rank, "shard") for rank in range(world)],
            replicas,
        ),
        (
            bugs.NOT_REDUCED_OVER_SHARDS,
            f"each rank has the sum over its {replicas} replicas: it was never reduced over the "
            "shard axis",
            [mesh.group(rank, "replicate") for rank in range(world)],
            shards,
        ),
    ):
        if missing == 1:
            continue
        for divided in (False, True):
            yield Candidate(
                name,
                words + (f", and is divided by {world} all the same" if divided else ""),
                _each(evidence, summands, 1 if divided else missing),
            )


def _each(evidence: Evidence, summands: list[tuple[int, ...]], times_: int) -> list[Enclosing]:
    """Sum over each rank's group. times_: factor by which it is divided less than the right sum."""
    mean = evidence.semantics.average == "mean"
    divisor = evidence.divisor / (times_ if mean else 1)
    made: dict[tuple[int, ...], Enclosing] = {}
    for group in summands:
        if group not in made:
            made[group] = enclosed_sum(evidence, itemgetter(list(group)), divisor)
    return [made[group] for group in summands]


def _last_microbatch(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient in which only the last microbatch is reduced over replicas."""
    mesh = evidence.case.axes
    replicas = mesh.size("replicate")
    world, count = evidence.passes.gradients.shape[:2]
    if count == 1 or replicas == 1:
        return
    mean = evidence.semantics.average == "mean"
    for before, words in (
        (replicas if mean else 1, ""),
        (1, ", and the rest is divided by the number of replicas all the same"),
    ):
        enclosures = []
        for rank in range(world):
            weights = torch.zeros(world, count, 1, dtype=torch.float64)
            weights[list(mesh.group(rank, "shard")), :-1] = before
            weights[:, -1] = 1.0
            enclosures.append(enclosed_sum(evidence, partial(torch.mul, weights), evidence.divisor))
        yield Candidate(
            bugs.LAST_MICROBATCH_ONLY_OVER_REPLICAS,
            f"only the last of {count} microbatches is reduced over the replicate axis" + words,
            enclosures,
        )
