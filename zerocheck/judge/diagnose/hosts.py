"""Causes of a wrong gradient of ranks that take their host for the world. None on one host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from ... import causes as bugs
from ...machine.hosts import RankPlace, places
from .evidence import Candidate, Evidence, enclosed_sum, times


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over gradients divided by a host's ranks, or reduced on each host separately."""
    world, _ = evidence.passes.gradients.shape[:2]
    ranks = places(evidence.case.hosts, world)
    if ranks[-1].host == 0:
        return
    whole = [tuple(range(world))] * world
    yield from _over(evidence, ranks, whole, "")
    if evidence.case.axes.has("replicate"):
        axis = [evidence.case.axes.group(rank, "shard") for rank in range(world)]
        yield from _over(evidence, ranks, axis, " over the shard axis")


def _over(
    evidence: Evidence, ranks: Sequence[RankPlace], groups: Sequence[tuple[int, ...]], words: str
) -> Iterator[Candidate]:
    """Iterate over causes in a reduction over groups. groups: of each rank, the ranks of its own.

    Both readings are of a mean; of a sum nothing is divided.
    """
    world = len(ranks)
    mean = evidence.semantics.average == "mean"
    size = len(groups[0])
    if mean:
        sizes = ", ".join(str(size) for size in dict.fromkeys(r.local_world_size for r in ranks))
        yield Candidate(
            bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST,
            f"the sum{words or ' over ranks'} is divided by the number of ranks on a host "
            f"({sizes}; LOCAL_WORLD_SIZE), and not by {size}",
            [times(evidence, size / place.local_world_size) for place in ranks],
        )
    within = [
        [other for other in groups[rank] if ranks[other].host == place.host]
        for rank, place in enumerate(ranks)
    ]
    yield Candidate(
        bugs.REDUCED_WITHIN_EACH_HOST,
        f"each host reduces the gradients of its own ranks{words}, and nothing is reduced between "
        "hosts",
        [
            enclosed_sum(
                evidence, itemgetter(here), evidence.divisor * (len(here) / world if mean else 1)
            )
            for here in within
        ],
    )
