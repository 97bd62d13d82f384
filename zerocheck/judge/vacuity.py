"""Vacuous obligations of a case: those that hold where nothing could fail.

An obligation is vacuous in a case if it holds, and would also hold for code that does not do the
work at all: never shards, reduces, clips, updates, or communicates. VACUOUS in protocol/verdicts.py
gives the conditions. Evidence is taken from all steps; one that could fail is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import prod

import torch

from ..protocol.observations import RankObservation
from ..protocol.verdicts import Obligation
from .layout import Buffers
from .pieces import split
from .state import State

RULES = frozenset[Obligation](
    ("ownership", "loss", "gradient", "clip", "update", "publish", "buffers")
)
"""Obligations of a step whose evidence is taken here. Any other is vacuous in no case."""


class Vacuity:
    """Collector, step by step, of the obligations that could have failed."""

    def __init__(self, observations: Sequence[RankObservation]) -> None:
        """Start without evidence. observations: the ranks' observations of the case."""
        self._world_size = len(observations)
        self._could_fail: set[Obligation] = set()
        if _partitioned(observations):
            self._could_fail.add("ownership")

    def losses(self, expected: Iterable[Iterable[float]]) -> None:
        """Take the losses of one device, per rank and microbatch."""
        if "loss" not in self._could_fail and any(
            math.isfinite(loss) and loss != 0 for rank in expected for loss in rank
        ):
            self._could_fail.add("loss")

    def gradient(self, exact: Iterable[torch.Tensor]) -> None:
        """Take the gradient of one device, before clipping, in pieces."""
        if "gradient" not in self._could_fail and any(
            bool(((one != 0) & one.isfinite()).any()) for one in exact
        ):
            self._could_fail.add("gradient")

    def clipped(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the gradient before and after clipping, piece by piece; NaN where there is none."""
        if "clip" not in self._could_fail and any(
            _differs(before, after) for before, after in pieces
        ):
            self._could_fail.add("clip")

    def moved(self, before: State, after: State) -> None:
        """Take the states around an update."""
        if "update" not in self._could_fail and _differs(before.parameter, after.parameter):
            self._could_fail.add("update")
            if self._world_size > 1:
                self._could_fail.add("publish")

    def buffers(self, before: Sequence[Buffers], expected: Sequence[Buffers]) -> None:
        """Take the buffers of each rank around a step, by the declared semantics."""
        if "buffers" not in self._could_fail and any(
            name in held and _differs(held[name], value)
            for held, wanted in zip(before, expected, strict=True)
            for name, value in wanted.items()
        ):
            self._could_fail.add("buffers")

    def among(self, holding: Iterable[Obligation]) -> tuple[Obligation, ...]:
        """Select the obligations that hold although nothing could have failed."""
        return tuple(one for one in holding if one in RULES and one not in self._could_fail)


def _differs(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return True if an element is another one, and finite: NaN is unlike itself."""
    before, after = before.reshape(-1), after.reshape(-1)
    return any(
        bool(((before[here] != after[here]) & after[here].isfinite()).any())
        for here in split(len(after))
    )


def _partitioned(observations: Sequence[RankObservation]) -> bool:
    """Return True if some rank lacks some tensor, or a part of one."""
    held = [
        {entry for manifest in rank.manifests for entry in manifest if entry.present}
        for rank in observations
    ]
    return any(entries != held[0] for entries in held) or any(
        entry.stop - entry.start < prod(entry.shape) for entry in held[0]
    )
