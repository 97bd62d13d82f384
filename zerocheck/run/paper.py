"""Formulas of the ZeRO paper for a rank's bytes and communication, to compare with measurements.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5: of one copy of parameters, gradients and
optimizer states (16 Psi bytes, in fp32 with AdamW 4 + 4 + 8) stage 1 shards the last, stage 2 the
last two, stage 3 all over N ranks. Section 7: a step sends 2 Psi, in stage 3 it sends 3 Psi, which
is for large N: a rank of a ring sends N - 1 of N parts.

The paper ignores padding, step counts and buckets. In models of a few hundred elements they are a
good part of the memory, and the ratio means little.
"""

from __future__ import annotations

from ..protocol.verdicts import Weighed

STAGES = (0, 1, 2, 3)


def ideal(copy: tuple[int, int, int], ranks: int, stage: int) -> float:
    """Return the paper's bytes per rank in a stage."""
    parameters, gradients, states = copy
    return (
        parameters / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + states / (ranks if stage >= 1 else 1)
    )


def nearest(one: Weighed, ranks: int) -> int:
    """Return the stage whose ideal is the nearest to the bytes held, by their ratio."""

    def off(stage: int) -> float:
        wanted = ideal(one.copy, ranks, stage)
        return max(one.held / wanted, wanted / one.held) if wanted else 0.0

    return min(STAGES, key=off)


def in_psi(sent: float, trained: int, ranks: int) -> float:
    """Express bytes sent in a step in units of Psi (N - 1) / N: the bytes of trained parameters."""
    psi = trained * (ranks - 1) / ranks
    return sent / psi if psi else 0.0
