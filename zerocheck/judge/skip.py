"""Part of the obligation update: all ranks skip a step if and only if it must be skipped.

Under dynamic loss scaling a step whose reduced gradient is not finite somewhere is skipped on all
ranks, and only such a step; a skipped step leaves every bit of the state alone. Without loss
scaling an implementation may skip such a step, or take it, as one device would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from .. import causes as bugs
from ..case.schema import Case
from ..protocol.verdicts import Violation
from .compare import different_bits
from .layout import ParameterLayout
from .state import State


class SkipReport(Protocol):
    """Report of a rank on a step: whether it was skipped, and the scale of its losses."""

    @property
    def skipped(self) -> bool: ...

    @property
    def loss_scale(self) -> float: ...


def check_reports(reports: Sequence[SkipReport], *, step: int) -> Violation | None:
    """Check that ranks agree on skipping and on the loss scale, a positive number."""
    scales = [rank.loss_scale for rank in reports]
    odd = tuple(r for r, scale in enumerate(scales) if not (scale > 0 and math.isfinite(scale)))
    if odd:
        return _violation(
            step,
            f"the reported loss scale is {scales[odd[0]]:g}; it must be positive and finite",
            "loss scale",
            ranks=odd,
            role="loss_scale",
        )
    skipped = tuple(r for r, rank in enumerate(reports) if rank.skipped)
    if 0 < len(skipped) < len(reports):
        words = ", ".join(str(rank) for rank in skipped)
        return _violation(
            step,
            f"only some ranks skipped the step (ranks {words} of {len(reports)}): they must agree "
            "on whether there was an overflow",
            bugs.RANKS_DISAGREE,
            ranks=skipped,
        )
    if len(set(scales)) > 1:
        words = ", ".join(f"{scale:g}" for scale in scales)
        return _violation(
            step,
            f"ranks have different loss scales ({words}): they must agree on it",
            bugs.RANKS_DISAGREE,
            role="loss_scale",
        )
    return None


def check(
    before: State,
    after: State,
    layout: ParameterLayout,
    case: Case,
    reports: Sequence[SkipReport],
    *,
    finite: bool | None,
    step: int,
) -> tuple[bool, Violation | None]:
    """Check ranks that agree: (True if there is no update to judge, violation or None).

    finite: whether the whole reduced gradient is; None if that is not known.
    """
    skipped = all(rank.skipped for rank in reports)
    scaling = case.training.loss_scale is not None
    violation = None
    if finite is not None:
        violation = decision(skipped=skipped, finite=finite, scaling=scaling, step=step)
    if violation is None and skipped:
        violation = untouched(before, after, layout, step=step)
    return skipped or violation is not None, violation


def decision(*, skipped: bool, finite: bool, scaling: bool, step: int) -> Violation | None:
    """Check the decision. skipped: by all ranks; scaling: the case scales its losses."""
    if skipped and finite:
        return _violation(
            step,
            "the step was skipped though every element of the reduced gradient is finite",
            bugs.STEP_SKIPPED,
        )
    if scaling and not (skipped or finite):
        return _violation(
            step,
            "the step was not skipped though the reduced gradient is not finite",
            bugs.STEP_NOT_SKIPPED,
        )
    return None


def untouched(
    before: State,
    after: State,
    layout: ParameterLayout,
    *,
    step: int,
    why: str = "the step is reported as skipped",
) -> Violation | None:
    """Check that a skipped step changes no bit of parameters and moments, and no step count."""
    pairs = [("parameter", before.parameter, after.parameter)]
    pairs += [
        (role, before.moment(role), after.moment(role))
        for role in {**before.moments, **after.moments}
    ]
    for role, old, new in pairs:
        changed = different_bits(old, new)
        if role != "parameter":
            changed &= layout.trainable
        if bool(changed.any()):
            first = int(changed.nonzero()[0])
            return Violation(
                obligation="update",
                step=step,
                role=role,
                tensors=layout.names_of(changed),
                ranks=(),
                element=layout.at(first)[1],
                observed=float(new[first]),
                expected=float(old[first]),
                bound=0.0,
                wrong=int(torch.count_nonzero(changed)),
                total=layout.size,
                explanation=f"{why}, but it changed {role}",
                attribution=f"{why}, but it changed {role}",
                causes=(bugs.SKIPPED_STEP_CHANGED_THE_STATE,),
            )
    for place, old_count, new_count in zip(layout.places, before.steps, after.steps, strict=True):
        if place.trainable and old_count != new_count:
            return _violation(
                step,
                f"{why}, but it is counted for {place.name}",
                bugs.SKIPPED_STEP_CHANGED_THE_STATE,
                role="step",
                tensors=(place.name,),
            )
    return None


def _violation(
    step: int,
    explanation: str,
    cause: str,
    *,
    ranks: tuple[int, ...] = (),
    role: str = "step",
    tensors: tuple[str, ...] = (),
) -> Violation:
    return Violation(
        obligation="update",
        step=step,
        role=role,
        tensors=tensors,
        ranks=ranks,
        explanation=explanation,
        attribution=explanation,
        causes=(cause,),
    )
