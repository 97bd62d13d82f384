"""Obligation: every rank's next forward uses the updated parameters.

Copies are compared bit for bit. Parameters that are sharded are judged by the next forward: see
judge/case.py, which asks whether a wrong loss is the one of the previous step's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case
from ...causes.registry import said
from ...contract.shard import Role
from ...protocol.verdicts import Explanation, Violation
from ..assemble import Observation, RoleState
from ..attribution.copies import published_copies
from ..attribution.guard import guarded
from ..compare import different_bits
from ..context import StepContext
from ..diagnose.named import if_named, named
from ..diagnose.publish import causes
from ..layout import ParameterLayout
from ..obligation import Checked, ObligationCheck
from ..pieces import split
from ..state import State


def check(
    observation: Observation,
    state: State,
    *,
    step: int,
    before: State | None = None,
    case: Case | None = None,
) -> Violation | None:
    """Check that copies agree with each other, with their owner's, and with their master.

    A master is compared after rounding to the dtype of the copy.

    before: the state before the step, for the diagnosis; case: for the attribution.
    """
    for role in ("parameter", *observation.states):
        held = observation.held(step, "state", role)
        if held is None:
            continue
        whole = state.published if role == "parameter" else held.whole
        earlier = before.per_rank if before is not None and role == "parameter" else None
        mastered = state.mastered is not None and role == "parameter"
        violation = _copies(held, whole, observation.layout, role, step, earlier, mastered=mastered)
        if violation is not None:
            right = "master" if mastered else "owner"
            copies = partial(published_copies, role, held, whole, observation, step, case, right)
            return replace(violation, attribution=guarded(copies))
    return None


def _copies(
    held: RoleState,
    whole: torch.Tensor,
    layout: ParameterLayout,
    role: str,
    step: int,
    per_rank: list[torch.Tensor] | None,
    *,
    mastered: bool = False,
) -> Violation | None:
    bad: list[int] = []
    names: tuple[str, ...] | None = None
    changed = torch.zeros(layout.size, dtype=torch.bool)
    sample: tuple[float, float, int] | None = None
    if held.held_once and whole is held.whole:
        return None
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        if plan.agrees(whole, part):
            continue
        wanted = plan.gather(whole)
        mask = different_bits(part, wanted)
        bad.append(rank)
        where = mask.nonzero().reshape(-1)
        positions = where if plan.index is None else plan.index[where]
        changed[positions] = True
        earlier = None if per_rank is None else per_rank[rank][positions]
        found = causes(part[where], wanted[where], earlier) if named() else ()
        names = found if names is None else tuple(name for name in names if name in found)
        if sample is None:
            error = (part[where].double() - wanted[where].double()).abs()
            worst = int(error.argmax())  # NaN is the largest
            sample = float(part[where][worst]), float(wanted[where][worst]), int(positions[worst])
    if sample is None:
        return None
    observed, expected, position = sample
    place, index = layout.at(position)
    tensors = layout.names_of(changed)
    names = names or if_named(bugs.COPIES_DIFFER)
    if mastered:
        text = "parameters are not their fp32 masters, rounded; they must be, bit for bit"
    else:
        text = f"copies of {role} differ between ranks; they must agree bit for bit"
    explanation = Explanation.of(names, said(names), text)
    return Violation(
        obligation="publish",
        step=step,
        role=role,
        tensors=(place.name, *(name for name in tensors if name != place.name)),
        ranks=tuple(bad),
        element=index,
        observed=observed,
        expected=expected,
        bound=0.0,
        wrong=int(torch.count_nonzero(changed)),
        total=layout.size,
        explanation=explanation.text,
        causes=names,
        sentences=explanation.sentences,
    )


def _count(count: float | None) -> str:
    return "different on different ranks" if count is None else f"{count:g}"


def check_start(
    state: State,
    wanted: torch.Tensor,
    moments: Mapping[Role, torch.Tensor],
    counts: list[float],
    layout: ParameterLayout,
    dtype: torch.dtype = torch.float32,
) -> Violation | None:
    """Check the base case: before the first step every bit is the model's, or the restored state's.

    wanted: the parameters; moments, counts: what was restored (empty and zeros without that);
    dtype: of parameters beside masters.
    """
    for place, count, expected in zip(layout.places, state.steps, counts, strict=True):
        if place.trainable and place.stop > place.start and count != expected:
            return Violation(
                obligation="publish",
                step=-1,
                role="step",
                tensors=(place.name,),
                ranks=(),
                observed=count,
                expected=expected,
                explanation="before the first step, the optimizer's step count is "
                f"{_count(count)}, and not {expected:g}, "
                + ("as in the state that was restored" if expected else "since no step was taken"),
                causes=if_named(bugs.INITIAL_STATE),
            )
    if state.mastered is not None and not bool(state.mastered.all()):
        # What is frozen has no master: it is rounded as what is published is.
        wanted = torch.where(state.mastered, wanted, wanted.to(dtype).to(wanted.dtype))
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [("parameter", state.parameter, wanted)]
    for moment in dict.fromkeys((*moments, *state.moments)):
        restored = moments.get(moment)
        zero = torch.zeros_like(wanted) if restored is None else restored
        pairs.append((moment, state.moment(moment), zero))
    for role, observed, vector in pairs:
        changed = torch.empty(layout.size, dtype=torch.bool)
        for here in split(layout.size):
            changed[here] = different_bits(observed[here], vector[here])
        if role != "parameter":
            changed &= layout.trainable
        if not bool(changed.any()):
            continue
        first = int(changed.nonzero()[0])
        place, index = layout.at(first)
        return Violation(
            obligation="publish",
            step=-1,
            role=role,
            tensors=layout.names_of(changed),
            ranks=(),
            element=index,
            observed=float(observed[first]),
            expected=float(vector[first]),
            bound=0.0,
            wrong=int(torch.count_nonzero(changed)),
            total=layout.size,
            explanation=f"before the first step, {place.name} has another {role} than the model "
            "or the state that was restored",
            causes=if_named(bugs.INITIAL_STATE),
        )
    return None


def stale(step: int, loss: Violation, attribution: str = "") -> Violation:
    """Return the violation where a wrong loss is that of the parameters before the update."""
    words = "the forward computed with the parameters of the previous step: "
    words += "they were gathered before the update, or not gathered again after it"
    return Violation(
        obligation="publish",
        step=step,
        role="parameter",
        tensors=(),
        ranks=loss.ranks,
        explanation=words if named() else "the forward computed with other parameters",
        attribution=attribution,
        observed=loss.observed,
        expected=loss.expected,
        causes=if_named(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP),
    )


def _check_step(step: StepContext) -> Iterator[Checked]:
    violation = check(
        step.observation, step.settled, step=step.index, before=step.before, case=step.case
    )
    yield Checked(violation=violation)


PUBLISH = ObligationCheck("publish", _check_step, frozenset({"state"}))
