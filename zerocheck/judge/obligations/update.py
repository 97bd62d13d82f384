"""Obligation: the next state lies in its enclosure, and a step is skipped only if it must be.

See update.py and skip.py of the judge; hidden_states.py judges an optimizer that exposes none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ... import causes as bugs
from ...contract.groups import learning_rates
from ..assemble import RoleState
from ..context import StepContext
from ..hidden_states import wrong_gradients
from ..obligation import Checked, ObligationCheck
from ..recipe import Update


def _check_step(step: StepContext) -> Iterator[Checked]:
    over, violation = step.skipping
    if over:
        yield Checked(violation=violation)
    elif step.judged.hidden_states is not None:
        if step.opaque is not None:
            yield Checked(*step.opaque[:2])
    elif step.applied is not None:
        yield _judged(step, step.applied, unclipped=step.reduced)
    elif step.recovery is not None:
        recovered = step.recovery.recovered
        yield _judged(step, recovered.held, error=recovered.error)


def _judged(
    step: StepContext,
    applied: RoleState,
    *,
    unclipped: RoleState | None = None,
    error: torch.Tensor | float = 0.0,
) -> Checked:
    """Judge the update, given the gradient that the optimizer used and its uncertainty."""
    update = Update(
        step.before,
        step.after,
        applied.whole,
        error,
        learning_rates(step.case, step.index),
        [place.name in applied.present for place in step.layout.places],
        None if unclipped is None or unclipped is applied else unclipped.whole,
        lambda: step.previous("clipped"),
        lambda: _others(step, applied),
    )
    return Checked(*step.judged.updates.check(update, step=step.index))


def _others(step: StepContext, applied: RoleState) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (cause, gradient) of an optimizer that is given another than the others see."""
    ranks = step.case.axes.data_parallel_size
    if ranks > 1:
        yield bugs.GRADIENT_TIMES_W, applied.whole * ranks
        yield bugs.GRADIENT_OVER_W, applied.whole / ranks
    if step.forward_holds:
        for name, gradient in wrong_gradients(step.replay(), step.semantics):
            if name == bugs.LOCAL_GRADIENT_ONLY:
                yield name, gradient


UPDATE = ObligationCheck("update", _check_step, frozenset({"state"}))
