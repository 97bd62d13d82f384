"""Places of all shards of a live run, in the form in which ownership is judged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..floating_point import Format
from ..judge.layout import ParameterLayout, ParameterPlace
from ..protocol.observations import Entry, Point
from .step_record import AFTER, RankVerdict, ShardPiece


class ShardMap:
    """Shards that all ranks hold after a checked step: a `judge.ownership.Shards`."""

    replicated = None

    def __init__(self, verdicts: Sequence[RankVerdict]) -> None:
        self._verdicts = verdicts
        self.world_size = len(verdicts)
        self.layout = _layout([piece for one in verdicts for piece in one.summary.pieces])

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


def _layout(pieces: Sequence[ShardPiece]) -> ParameterLayout:
    """Return the layout of the run's model: shapes are those that are reported first."""
    first: dict[str, ShardPiece] = {}
    trains: set[str] = set()
    for piece in pieces:
        first.setdefault(piece.name, piece)
        if piece.group >= 0:
            trains.add(piece.name)
    places, start = [], 0
    for name, piece in first.items():
        stop = start + torch.Size(piece.entry.shape).numel()
        format = Format.of(piece.torch_dtype)
        places.append(
            ParameterPlace(name, piece.entry.shape, start, stop, name in trains, 0, format)
        )
        start = stop
    return ParameterLayout.of_places(places)
