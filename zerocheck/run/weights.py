"""Memory and communication of the measured cases of an implementation, by world size."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.verdicts import Weighed
from .paper import ideal, in_psi, nearest
from .records import CaseFinished


@dataclass
class Weights:
    """Measured cases of one implementation on one number of ranks.

    largest: of the case with the most elements, for there padding counts least, among those with
    the fewest microbatches: the paper has one; microbatches: of that case; ratios: of each case,
    what the fullest rank holds over the paper's ideal.
    """

    ranks: int
    largest: Weighed
    microbatches: int
    ratios: list[float] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """Declared stage, or, where none is, the nearest."""
        return stage_of(self.largest, self.ranks)

    @property
    def ratio(self) -> float:
        """Bytes held by a rank over the ideal, in the largest case."""
        return _ratio(self.largest, self.ranks)

    @property
    def redundancy(self) -> float:
        """Bytes of all ranks over those of one copy: N without sharding, 1 if all is sharded."""
        whole = sum(self.largest.copy)
        return self.largest.together / whole if whole else 0.0

    @property
    def psi(self) -> float:
        """Communication of the largest case in a step, in units of Psi (N - 1) / N."""
        return in_psi(self.largest.sent, self.largest.trained, self.ranks)


def stage_of(one: Weighed, ranks: int) -> int:
    """Return the declared stage, or, where none is, the nearest."""
    return nearest(one, ranks) if one.stage is None else one.stage


def _ratio(one: Weighed, ranks: int) -> float:
    wanted = ideal(one.copy, ranks, stage_of(one, ranks))
    return one.held / wanted if wanted else 0.0


def add(into: dict[int, Weights], record: CaseFinished) -> None:
    """Count one case, if it was measured. into: by world size.

    The paper knows no replicas, so nothing can be said of a mesh of two axes.
    """
    one = record.judgement.weighed if record.judgement is not None else None
    if one is None or len(record.case.mesh) > 1:
        return
    ranks, microbatches = record.case.world_size, record.case.training.microbatches
    if ranks not in into:
        into[ranks] = Weights(ranks, one, microbatches)
    weights = into[ranks]
    weights.ratios.append(_ratio(one, ranks))
    if (-microbatches, one.elements) > (-weights.microbatches, weights.largest.elements):
        weights.largest, weights.microbatches = one, microbatches
