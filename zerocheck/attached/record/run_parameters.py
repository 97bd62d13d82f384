"""Parameters of a live run and the places of their shards, from what its ranks report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...floating_point import Format
from ...judge.layout import ParameterLayout, ParameterPlace
from ...optimizers import STATES
from ...protocol.observations import Entry, Point
from .dtypes import dtype_of
from .step_record import AFTER, RankVerdict, StepSummary


class RunParameter(NamedTuple):
    """A parameter of the run."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool
    """True if the optimizer of any rank has it: with ZeRO-1 only its owner's does."""
    whole: bool
    """True if every rank holds all of it."""
    stage: int = 0
    """Stage of a pipeline whose ranks hold it."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return dtype_of(self.dtype)


def run_parameters(ranks: Sequence[StepSummary]) -> list[RunParameter]:
    """Return all parameters of the run, in the order in which ranks report them first."""
    found: dict[str, RunParameter] = {}
    whole: dict[str, int] = {}
    for summary in ranks:
        for piece in summary.pieces:
            entry, trains = piece.entry, piece.group >= 0
            first = found.setdefault(
                piece.name,
                RunParameter(piece.name, entry.shape, piece.dtype, trains, False, summary.stage),
            )
            found[piece.name] = first._replace(trains=first.trains or trains)
            numel = torch.Size(entry.shape).numel()
            whole[piece.name] = whole.get(piece.name, 0) + (entry.stop - entry.start == numel)
    return [one._replace(whole=whole[one.name] == len(ranks)) for one in found.values()]


def layout_of(parameters: Iterable[RunParameter]) -> ParameterLayout:
    """Return the layout of these parameters, one after the other."""
    places, start = [], 0
    for one in parameters:
        stop = start + torch.Size(one.shape).numel()
        format = Format.of(one.torch_dtype)
        places.append(ParameterPlace(one.name, one.shape, start, stop, one.trains, 0, format))
        start = stop
    return ParameterLayout.of_places(places)


class ShardMap:
    """Shards that all ranks hold after a checked step: a `judge.ownership.Shards`."""

    replicated = None
    states = STATES

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
