"""Text of the bytes and the communication of measured cases, next to those of the ZeRO paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..run.records.footprint import Footprint, ideal
from ..run.records.tally import ImplementationTally
from .communication import differences, paper, sent

TITLE = "Held between steps and sent in a step, next to the ZeRO paper"
EXPLAINED = (
    "Per number of ranks, of the largest case with one microbatch: the bytes of the fullest rank "
    "over the ideal of the stage; redundancy, the bytes of all ranks over those of one copy. What "
    "a rank sends is in units of Psi (N - 1) / N, the median over the cases with the fewest "
    "microbatches, where the paper has 2 for stages 0 to 2 and 3 for stage 3; why says what of the "
    "median case is different. The ideal knows no padding, step counts or buckets, which in models "
    "as small as these are much of it. The obligation persistent compares exactly; it needs a "
    "layout."
)
HEADERS = ("implementation", "ranks", "Psi", "held", "ideal", "ratio", "all cases", "redundancy",
           "sent, Psi", "paper", "why")  # fmt: skip


def _formulas(states: int) -> dict[int, str]:
    """Return the bytes per rank with fp32 weights by stage. states: bytes per element."""
    return {
        0: f"{8 + states} Psi",
        1: f"8 Psi + {states} Psi/N" if states else "8 Psi",
        2: f"4 Psi + {4 + states} Psi/N",
        3: f"{8 + states} Psi/N",
    }


def rows(implementations: dict[str, ImplementationTally]) -> list[list[str]]:
    """Return a row for each implementation and number of ranks; none if nothing was measured."""
    return [
        [
            name,
            str(one.ranks),
            f"{one.largest.elements:,}",
            f"{one.largest.held:,}",
            formula(one),
            f"{one.ratio:.2f}",
            f"{min(one.ratios):.2f} to {max(one.ratios):.2f}",
            f"{one.redundancy:.2f}",
            sent(one),
            str(paper(one)),
            "; ".join(differences(one)) or "–",
        ]
        for name, one in _each(implementations)
    ]


def lines(implementations: dict[str, ImplementationTally]) -> list[str]:
    """Return one sentence for each implementation, on its largest case on several ranks."""
    text = []
    for name, implementation in implementations.items():
        if not implementation.weights:
            continue
        one = max(implementation.weights.values(), key=_informative)
        ranks = f"{one.ranks} rank{'s' if one.ranks > 1 else ''}"
        parts = [
            f"{one.ratio:.2f} times {formula(one)} ({one.largest.elements:,} elements)",
            f"redundancy {one.redundancy:.2f}",
        ]
        if one.ranks > 1:
            parts.append(f"{sent(one)} Psi sent (paper: {paper(one)})")
            parts += differences(one)
        if not one.largest.predicted:
            parts.append("no layout, so the ratio alone")
        text.append(f"{name}, {ranks}: {'; '.join(parts)}")
    return text


def _informative(one: Footprint) -> tuple[bool, int, int, int]:
    """Return a sort key: the greater, the more the case shows of sharding."""
    return one.ranks > 1, -one.microbatches, one.largest.elements, one.ranks


def formula(one: Footprint) -> str:
    """Return the ideal in words; of the nearest stage, where none is declared."""
    parameters, gradients, states = one.largest.copy
    plain = parameters == gradients == 4 * one.largest.elements
    words = f"stage {one.stage}"
    if plain and states % one.largest.elements == 0:
        words = _formulas(states // one.largest.elements)[one.stage]
    return words if one.largest.stage is not None else f"{words}, the nearest"


def on_most_ranks(implementation: ImplementationTally) -> Footprint | None:
    """Return what was measured on the most ranks, None where it was on one at most."""
    ranks = max(implementation.weights, default=1)
    return implementation.weights[ranks] if ranks > 1 else None


def _each(implementations: dict[str, ImplementationTally]) -> Iterator[tuple[str, Footprint]]:
    for name, implementation in implementations.items():
        for ranks in sorted(implementation.weights):
            yield name, implementation.weights[ranks]


def as_data(implementation: ImplementationTally) -> list[dict[str, Any]]:
    """Return bytes, ratios and Psi by world size for the JSON report."""
    return [
        {
            "world_size": one.ranks,
            "cases": len(one.ratios),
            "elements": one.largest.elements,
            "held": one.largest.held,
            "ideal": ideal(one.largest.copy, one.ranks, one.stage),
            "stage": one.stage,
            "declared": one.largest.stage is not None,
            "layout": one.largest.predicted,
            "ratio": one.ratio,
            "ratios": [min(one.ratios), max(one.ratios)],
            "redundancy": one.redundancy,
            "microbatches": one.microbatches,
            "sent": one.largest.sent,
            "sent_psi": one.middle.psi,
            "sent_psi_by_kind": dict(one.middle.by_kind),
            "paper_psi": paper(one),
            "why": differences(one),
        }
        for _, one in _each({implementation.name: implementation})
    ]
