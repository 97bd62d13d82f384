"""Memory and communication of the measured cases of an implementation, by world size.

The formulas are those of the ZeRO paper, Rajbhandari et al. (arXiv 1910.02054), section 5: of one
copy of parameters, gradients and optimizer states (in fp32 with AdamW 4 + 4 + 8 bytes Psi, with SGD
4 + 4 + 4, without momentum 4 + 4) stage 1 shards the last, stage 2 the last two, stage 3 all over N
ranks. Section 7: a step sends 2 Psi, in stage 3 it sends 3 Psi, which is for large N: a rank of a
ring sends N - 1 of N parts.

The paper ignores padding, step counts and buckets. In models of a few hundred elements they are a
good part of the memory, and the ratio means little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...case.schema import Case
from ...protocol.verdicts import MeasuredBytes
from .records import CaseFinished

STAGES = (0, 1, 2, 3)


def ideal(copy: tuple[int, int, int], ranks: int, stage: int) -> float:
    """Return the paper's bytes per rank in a stage."""
    parameters, gradients, states = copy
    return (
        parameters / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + states / (ranks if stage >= 1 else 1)
    )


def nearest(one: MeasuredBytes, ranks: int) -> int:
    """Return the stage whose ideal is the nearest to the bytes held, by their ratio."""

    def off(stage: int) -> float:
        wanted = ideal(one.copy, ranks, stage)
        return max(one.held / wanted, wanted / one.held) if wanted else 0.0

    return min(STAGES, key=off)


def in_psi(sent: float, trained: int, ranks: int) -> float:
    """Express bytes sent in a step in units of Psi (N - 1) / N: the bytes of trained parameters."""
    psi = trained * (ranks - 1) / ranks
    return sent / psi if psi else 0.0


@dataclass(frozen=True)
class SentInStep:
    """Communication of one case in a step, in units of Psi (N - 1) / N.

    psi: sent by the rank that sends most; by_kind: of it, by kinds of collectives.
    """

    case: Case
    psi: float
    by_kind: Mapping[str, float]

    @classmethod
    def of(cls, case: Case, one: MeasuredBytes) -> SentInStep:
        """Express what was measured in a case in these units."""
        ranks = case.world_size
        kinds = {kind: in_psi(sent, one.trained, ranks) for kind, sent in one.by_kind.items()}
        return cls(case, in_psi(one.sent, one.trained, ranks), kinds)


@dataclass
class Footprint:
    """Measured cases of one implementation on one number of ranks.

    largest: of the case with the most elements, for there padding counts least, among those with
    the fewest microbatches: the paper has one; microbatches: of that case; ratios: of each case,
    what the fullest rank holds over the paper's ideal; sent: cases with so many microbatches.
    """

    ranks: int
    largest: MeasuredBytes
    microbatches: int
    ratios: list[float] = field(default_factory=list)
    sent: list[SentInStep] = field(default_factory=list)

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
        return self.largest.total / whole if whole else 0.0

    @property
    def middle(self) -> SentInStep:
        """The case of the median communication in a step; of two, that with less."""
        return sorted(self.sent, key=lambda one: one.psi)[(len(self.sent) - 1) // 2]


def stage_of(one: MeasuredBytes, ranks: int) -> int:
    """Return the declared stage, or, where none is, the nearest."""
    return nearest(one, ranks) if one.stage is None else one.stage


def _ratio(one: MeasuredBytes, ranks: int) -> float:
    wanted = ideal(one.copy, ranks, stage_of(one, ranks))
    return one.held / wanted if wanted else 0.0


def add(into: dict[int, Footprint], record: CaseFinished) -> None:
    """Count one case, if it was measured. into: by world size.

    The paper knows no replicas, so a mesh with a replicate axis is not compared.
    """
    one = record.judgement.measured_bytes if record.judgement is not None else None
    if one is None or record.case.axes.has("replicate"):
        return
    ranks, microbatches = record.case.world_size, record.case.training.microbatches
    if ranks not in into:
        into[ranks] = Footprint(ranks, one, microbatches)
    weights = into[ranks]
    weights.ratios.append(_ratio(one, ranks))
    if microbatches < weights.microbatches:
        weights.sent.clear()
    if microbatches <= weights.microbatches:
        weights.sent.append(SentInStep.of(record.case, one))
    if (-microbatches, one.elements) > (-weights.microbatches, weights.largest.elements):
        weights.largest, weights.microbatches = one, microbatches
