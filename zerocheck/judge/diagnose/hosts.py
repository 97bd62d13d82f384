"""Causes of a wrong gradient of ranks that take their host for the world. None on one host."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from ... import causes as bugs
from ...hosts import places
from .evidence import Candidate, Evidence, enclosed_sum, times


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over gradients divided by a host's ranks, or reduced on each host separately."""
    world, _ = evidence.passes.gradients.shape[:2]
    ranks = places(evidence.case.hosts, world)
    if ranks[-1].host == 0:
        return
    mean = evidence.semantics.average == "mean"
    if mean:
        sizes = ", ".join(str(size) for size in dict.fromkeys(r.local_world_size for r in ranks))
        yield Candidate(
            bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST,
            f"the sum over ranks is divided by the number of ranks on a host ({sizes}; "
            f"LOCAL_WORLD_SIZE), and not by {world}",
            [times(evidence, world / place.local_world_size) for place in ranks],
        )
    yield Candidate(
        bugs.REDUCED_WITHIN_EACH_HOST,
        "each host reduces the gradients of its own ranks, and nothing is reduced between hosts",
        [
            enclosed_sum(
                evidence,
                itemgetter([other for other, its in enumerate(ranks) if its.host == place.host]),
                evidence.divisor * (place.local_world_size / world if mean else 1),
            )
            for place in ranks
        ],
    )
