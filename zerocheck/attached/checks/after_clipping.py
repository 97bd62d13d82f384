"""Check that the optimizer is given the clipped gradient, and nothing has changed it since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from zerocheck_reference import unit_roundoff

from ... import causes as bugs
from ...judge.compare import different_bits
from ...protocol.verdicts import Violation
from ..record.step_record import StepSummary, element_of
from .slices import SliceContext


class _Changed(NamedTuple):
    """Gradient of a piece that is not the clipped one; mask: of the elements that differ."""

    number: int
    clipped: torch.Tensor
    given: torch.Tensor
    mask: torch.Tensor


def after_clipping(context: SliceContext) -> Violation | None:
    """Compare what the optimizer was given with what clipping left, bit for bit.

    Whatever belongs to an update comes before clipping: the division by a loss scale, and that by
    the number of microbatches.
    """
    found = [*_changed(context)]
    if not found:
        return None
    summary = context.summary
    first = found[0]
    worst = int(first.mask.nonzero()[0])
    text, cause = _explained(found, summary)
    return Violation(
        obligation="clip",
        step=summary.number,
        role="gradient",
        tensors=tuple(dict.fromkeys(summary.pieces[one.number].name for one in found)),
        ranks=(),
        explanation=f"the optimizer is given another gradient than the clipped one{text}",
        element=element_of(summary.pieces[first.number], worst),
        observed=float(first.given[worst]),
        expected=float(first.clipped[worst]),
        bound=0.0,
        wrong=sum(int(one.mask.sum()) for one in found),
        total=sum(one.mask.numel() for one in found),
        causes=(cause,),
    )


def _changed(context: SliceContext) -> Iterator[_Changed]:
    for number in sorted({number for clip in context.summary.clips for number in clip.pieces}):
        clipped, given = context.value("reclipped", number), context.value("gradient", number)
        clipped = context.value("clipped", number) if clipped is None else clipped
        if clipped is None or given is None or not context.took(number):
            continue
        mask = different_bits(given, clipped) & ~(given.isnan() & clipped.isnan())
        if bool(mask.any()):
            yield _Changed(number, clipped, given, mask)


def _explained(found: list[_Changed], summary: StepSummary) -> tuple[str, str]:
    """Return (the rest of the sentence, cause)."""
    if summary.scaling and _all_times(found, 1 / summary.loss_scale):
        scale = f"{summary.loss_scale:g}"
        return (
            f"; it is divided by the loss scale of {scale} after it was clipped, so the limit was "
            "that of the scaled gradient",
            bugs.CLIPPED_BEFORE_UNSCALING,
        )
    factor = _factor(found[0])
    if factor is not None and _all_times(found, factor):
        words = f"; every element is {factor:.6g} times what clipping made of it"
        return words, bugs.CHANGED_AFTER_CLIPPING
    return "", bugs.CHANGED_AFTER_CLIPPING


def _factor(one: _Changed) -> float | None:
    largest = int(one.clipped.abs().argmax())
    below = float(one.clipped[largest])
    return float(one.given[largest]) / below if below else None


def _all_times(found: list[_Changed], factor: float) -> bool:
    """Return True if all is `factor` times the clipped gradient, but for the roundings.

    There are three: of the factor, of the product by it, and of the product that the factor was
    taken from. What underflows is off by the smallest normal number.
    """
    return all(times(one.given, one.clipped, factor) for one in found)


def times(given: torch.Tensor, clipped: torch.Tensor, factor: float) -> bool:
    """Return True if a gradient is `factor` times another one, but for three roundings."""
    expected = clipped.double() * factor
    bound = 3 * unit_roundoff(given.dtype) * expected.abs() + torch.finfo(given.dtype).tiny
    return bool(((given.double() - expected).abs() <= bound).all())
