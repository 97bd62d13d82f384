"""Text of what a rank sends in a step, and why it is not what the ZeRO paper says.

Units are those of `run/records/footprint.py`: Psi (N - 1) / N. Section 7 of the paper has a
reduce-scatter and an all-gather, or one all-reduce, of 1 each: 2 for the stages 0 to 2. Stage 3
gathers the parameters twice: 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..run.records.footprint import Footprint, SentInStep

SEEN = 0.005
"""Smallest difference that is explained: the figures have two decimals."""

REDUCING = ("reduce_scatter", "reduce")
ALL_REDUCE = "all_reduce"
GATHERING = "all_gather"


def paper(one: Footprint) -> int:
    """Return the communication of the paper's stage, in Psi."""
    return 3 if one.stage == 3 else 2


def sent(one: Footprint) -> str:
    """Format the median over cases: `"2.01"`, or `"4.02 in 2 microbatches"`."""
    if one.ranks == 1:
        return "–"
    few = f" in {one.microbatches} microbatches" if one.microbatches > 1 else ""
    return f"{one.middle.psi:.2f}{few}"


def differences(one: Footprint) -> list[str]:
    """Return a sentence for each part in which the median case differs from the paper's number.

    None where it does not, on one rank, and where kinds of collectives are not known.
    """
    case = one.middle
    if one.ranks == 1 or not case.by_kind or abs(case.psi - paper(one)) < SEEN:
        return []
    return [*_lowered(case), *_of_gradients(one, case), *_of_parameters(one, case), *_others(case)]


def _lowered(case: SentInStep) -> Iterator[str]:
    if case.case.precision.reduce != "fp32":
        yield f"gradients travel in {case.case.precision.reduce}, half the bytes of fp32"
    if case.case.precision.compute != "fp32":
        yield f"parameters may travel in {case.case.precision.compute}, half the bytes of fp32"


def _of_gradients(one: Footprint, case: SentInStep) -> Iterator[str]:
    """Explain what reductions send: the paper has 1, or 2 in an all-reduce."""
    scattered = sum(case.by_kind.get(kind, 0.0) for kind in REDUCING)
    whole = case.by_kind.get(ALL_REDUCE, 0.0)
    usual = 2.0 if whole > scattered else 1.0
    reduced = max(whole, scattered)
    times = round(reduced / usual)
    if one.microbatches > 1 and times == one.microbatches:
        yield f"each of {times} microbatches reduces its gradients: {reduced:.2f}"
    elif reduced - usual >= SEEN and case.case.precision.reduce == "fp32":
        more = "norms, flags and buffers" if usual == 2.0 else "padding"
        yield f"reductions send {reduced:.2f}, more than {usual:g} by {more}"
    if usual == 2.0 and one.stage >= 1:
        yield "all-reduces give every rank the whole gradients, of which it needs a shard"


def _of_parameters(one: Footprint, case: SentInStep) -> Iterator[str]:
    """Explain what gathers send: the paper has 1 in the stages 1 and 2, and 2 in stage 3."""
    gathered = case.by_kind.get(GATHERING, 0.0)
    usual = {0: 0.0, 3: 2.0 * one.microbatches}.get(one.stage, 1.0)
    if case.case.precision.compute != "fp32":
        return
    if one.stage == 3 and usual - gathered >= SEEN:
        yield (
            f"{usual - gathered:.2f} is not gathered again: the root unit, and units that do not "
            "reshard, stay gathered for the backward"
        )
    elif gathered - usual >= SEEN and gathered:
        yield f"gathers send {gathered:.2f}, more than {usual:g} by padding"


def _others(case: SentInStep) -> Iterator[str]:
    """Explain broadcasts, and the all-reduces of norms, flags and buffers."""
    for kind, psi in case.by_kind.items():
        if psi < SEEN or kind in (*REDUCING, GATHERING):
            continue
        if kind == ALL_REDUCE:
            if psi <= sum(case.by_kind.get(one, 0.0) for one in REDUCING):
                yield f"all-reduces of norms, flags and buffers send {psi:.2f}"
        elif kind == "broadcast":
            yield f"broadcasts, of parameters from their owners or of buffers, send {psi:.2f}"
        else:
            yield f"{kind.replace('_', '-')}s send {psi:.2f}"
