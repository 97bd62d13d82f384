"""Obligation: given the parameters, the reduced gradient is that of the declared semantics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case
from ...case.shapes import unfrozen
from ...contract.semantics import Semantics
from ...protocol.verdicts import Violation, with_parts
from ..assemble import RoleState
from ..attribution.forwards import with_a_module_of
from ..attribution.guard import guarded
from ..attribution.wrong_gradient import attribution
from ..compare import compare_pieces, describe
from ..context import StepContext
from ..diagnose.by_tensor import causes_by_tensor
from ..diagnose.evidence import Evidence, Vectors
from ..diagnose.gradient import UNEXPLAINED, causes
from ..diagnose.loss import seeded_alike
from ..diagnose.named import named
from ..estimate import EXACT, Tolerances
from ..expected import Expected
from ..layout import ParameterLayout
from ..local import Passes
from ..obligation import Checked, ObligationCheck
from ..pieces import in_pieces
from . import publish


def check(
    held: RoleState | None,
    wanted: Expected,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
    used_before: Sequence[bool] = (),
    evidence: Callable[[], Evidence] | None = None,
) -> tuple[float, Violation | None]:
    """Check the gradient exposed at `reduced`: (share of the bound, violation or None).

    used_before: per parameter, whether a step before this one used it; evidence: asked for if
    something is wrong, None: look for no cause.
    """
    kept = () if case.training.set_to_none else used_before
    violation = _existence(held, wanted, layout, case, semantics, step, kept)
    if violation is not None or held is None:
        return 0.0, violation
    share = 0.0
    bad: list[int] = []
    first = None
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        if rank and plan is held.plans[0] and torch.equal(part, held.parts[0]):
            if 0 in bad:
                bad.append(rank)
            continue
        used, misfit = compare_pieces(
            lambda here, there, part=part: (part[here], wanted.of.at(there)),  # type: ignore[misc]
            plan.index,
            layout.size,
        )
        share = max(share, used)
        if misfit is not None:
            bad.append(rank)
            if first is None:
                first = (misfit, plan.index)
    if first is None:
        return share, None
    misfit, elements = first
    known = evidence() if evidence is not None and named() else None
    explanation = UNEXPLAINED if known is None else causes(known)
    violation = describe(
        misfit,
        layout,
        obligation="gradient",
        step=step,
        role="gradient",
        ranks=tuple(bad),
        elements=elements,
        explanation=explanation,
    )
    if known is not None and not explanation.causes and not in_pieces(None, layout.size):
        violation = with_parts(violation, causes_by_tensor(known))
    return share, violation


def _existence(
    held: RoleState | None,
    wanted: Expected,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    step: int,
    kept: Sequence[bool],
) -> Violation | None:
    """Check that gradients exist for used parameters and, with `skip`, for no others.

    kept: parameters whose gradient an earlier step made. `zero_grad(set_to_none=False)` leaves it
    there as zeros, on one device too; it may exist though this step does not use the parameter.
    What is unfrozen later has none until then.
    """
    if held is None:
        return None
    later = unfrozen(case)
    frozen = later if step < (case.training.unfreeze or 0) else ()
    for position, place in enumerate(layout.places):
        if not place.trainable:
            continue
        used = wanted.used[position]
        there = tuple(r for r, plan in enumerate(held.plans) if place.name in plan.present)
        lacking = tuple(r for r, plan in enumerate(held.plans) if place.name in plan.absent)
        if there and place.name in frozen:
            return _exists(
                step,
                place.name,
                there,
                "a gradient exists though the parameter is frozen: an optimizer would move it",
                bugs.GRADIENT_OF_A_FROZEN_PARAMETER,
            )
        nowhere = place.name in later and not there
        if used and (not there or lacking) and place.stop > place.start:
            return _exists(
                step,
                place.name,
                lacking or tuple(range(len(held.plans))),
                "a gradient is missing (None) though the parameter was used"
                + (", and unfrozen" if nowhere else ""),
                bugs.NOT_UNFROZEN if nowhere else bugs.GRADIENT_MISSING,
            )
        zeroed = bool(kept) and kept[position]
        if not used and there and not zeroed and semantics.unused == "skip":
            return _exists(
                step,
                place.name,
                there,
                "a gradient exists though no rank used the parameter; the declared semantics "
                "(unused='skip') leave it alone, an optimizer would move it",
                bugs.NONE_BECAME_ZERO,
            )
    return None


def _exists(step: int, name: str, ranks: tuple[int, ...], text: str, cause: str) -> Violation:
    return Violation(
        obligation="gradient",
        step=step,
        role="gradient",
        tensors=(name,),
        ranks=ranks,
        explanation=text,
        causes=(cause,),
        attribution=f"gradient of {name}: {text}",
    )


def _check_step(step: StepContext) -> Iterator[Checked]:
    """Judge the reduced gradient; where it was not exposed, what is recovered from states."""
    held = step.reduced
    if not step.forward_holds:
        return  # the forward was another one, so its gradient is too: one bug, one finding
    if held is not None:
        yield from _judged(step, held, step.expected)
        if in_pieces(None, step.layout.size):
            step.discard_gradients()
        return
    recovery, clip = step.recovery, step.recovered_clip
    clipped_wrong = clip is not None and clip[1] is not None
    if recovery is not None and not clipped_wrong and "clip" not in step.verdicts.violations:
        yield from _judged(step, recovery.recovered.held, recovery.expected(step.expected))


def _judged(
    step: StepContext, held: RoleState, wanted: Callable[[Tolerances], Expected]
) -> Iterator[Checked]:
    """Judge a gradient. wanted: what it must be, for a given tolerance."""
    step.verdicts.vacuity.gradient(wanted(step.tolerance.initial).of.exact())
    if "gradient" in step.verdicts.violations and in_pieces(None, step.layout.size):
        return  # the diagnosis of a large model takes time
    evidence = partial(_evidence, step, held, wanted)

    def within(tolerances: Tolerances) -> tuple[float, Violation | None]:
        return check(
            held,
            wanted(tolerances),
            step.layout,
            step.case,
            step.semantics,
            step=step.index,
            used_before=step.used_before,
            evidence=None if step.judged.brief else partial(evidence, tolerances),
        )

    share, violation = step.tolerance.judged("gradient", within)
    # Of a model that is judged in pieces there is no memory for it.
    small = not (step.judged.brief or in_pieces(None, step.layout.size))
    first = "gradient" not in step.verdicts.violations
    if violation is not None and violation.observed is not None and small and first:
        made_of = guarded(lambda: _attribution(step, evidence))
        if not violation.causes and held is step.reduced and named():
            violation = _of_a_module(step, held, violation)
        if bugs.PARAMETERS_OF_THE_PREVIOUS_STEP in violation.causes:
            violation, made_of = publish.stale(step.index, violation), ""
        violation = replace(violation, attribution=made_of)
    yield Checked(share, violation)


def _of_a_module(step: StepContext, held: RoleState, violation: Violation) -> Violation:
    """Return a wrong gradient, with the cause if one module has the parameters of before.

    The losses are the same then, as bits: of small changes they show nothing.
    """
    tolerances = step.tolerance.widest

    def explains(passes: Passes) -> bool:
        wanted = step.expected(tolerances, passes)
        args = held, wanted, step.layout, step.case, step.semantics
        return check(*args, step=step.index, used_before=step.used_before)[1] is None

    return step.judged.replayed.of_a_module(
        step.index,
        step.before,
        violation,
        with_a_module_of(step.before.per_rank, step.parameters_before, step.layout),
        tolerance=tolerances.loss,
        explains=explains,
    )


def _evidence(
    step: StepContext,
    held: RoleState,
    wanted: Callable[[Tolerances], Expected],
    tolerances: Tolerances,
) -> Evidence:
    return Evidence(
        held,
        step.passes,
        wanted(tolerances).of,
        step.layout,
        step.case,
        step.semantics,
        lambda scale: step.replay(scale=scale),
        step.previous("clipped"),
        lambda: step.replay(otherwise=True),
        partial(step.judged.replayed.added_in, step.index, step.before),
        partial(step.judged.replayed.redrawn, step.index, step.before),
        partial(step.judged.replayed.past_wrapper, step.index, step.before),
        step.observation.loss_scales(step.index)[0],
        step.judged.flat_buffers(),
        None if step.case.training.clip is None else step.previous("reduced"),
        seeded_alike(step.rng_after),
        tolerances.gradient,
    )


def _attribution(step: StepContext, evidence: Callable[[Tolerances], Evidence]) -> str:
    """Attribute a wrong gradient, by derived bounds first: estimated ones hide small terms."""
    others = _others(step)
    uses = cache(lambda: step.judged.replayed.uses(step.index, step.before))
    found = attribution(evidence(EXACT), others, uses)
    if not found.complete and step.tolerance.widest is not EXACT:
        wide = attribution(evidence(step.tolerance.widest), others, uses)
        found = wide if wide.complete else found
    return found.sentence


def _others(step: StepContext) -> Vectors:
    """Return the vectors of a step that a wrong gradient may be made of, by their names."""
    found: dict[str, torch.Tensor] = {}
    for point, more in (("clipped", ""), ("reduced", ", before it was clipped")):
        if more and step.case.training.clip is None:
            continue
        before = step.previous(point)  # type: ignore[arg-type]
        if before is not None:
            found[f"the gradient of the step before{more}"] = before
    found["the parameter"] = step.before.parameter
    for role, vector in step.before.moments.items():
        found[role] = vector
    return found


GRADIENT = ObligationCheck("gradient", _check_step)
