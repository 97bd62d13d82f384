"""Places of all shards of a live run, in the form in which ownership is judged."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.observations import Entry, Point
from .run_parameters import layout_of, run_parameters
from .step_record import AFTER, RankVerdict


class ShardMap:
    """Shards that all ranks hold after a checked step: a `judge.ownership.Shards`."""

    replica = 0

    def __init__(self, verdicts: Sequence[RankVerdict]) -> None:
        self._verdicts = verdicts
        self.world_size = len(verdicts)
        self.layout = layout_of(run_parameters([one.summary for one in verdicts]))

    def manifests(self, step: int, point: Point, role: str) -> tuple[tuple[int, ...], ...]:
        """Return one number for each rank: every shard map is checked once."""
        return tuple((rank,) for rank in range(self.world_size))

    def entries(self, step: int, point: Point, role: str) -> list[list[Entry]]:
        """Return, per rank, the places of its shards of a role."""
        return [
            [
                piece.entry
                for piece, hashes in zip(one.summary.pieces, one.hashes, strict=True)
                if f"{AFTER}.{role}" in hashes
            ]
            for one in self._verdicts
        ]
