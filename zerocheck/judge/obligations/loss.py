"""Obligation: each rank's loss, given the parameters, is that of one device, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from ... import causes as bugs
from ...case.mesh import Mesh
from ...causes.registry import said
from ...protocol.verdicts import Explanation, Violation
from ..attribution.guard import guarded
from ..context import StepContext
from ..diagnose.loss import Losses, causes, equal, same
from ..diagnose.named import named
from ..diagnose.unwritten import unwritten
from ..estimate import Tolerances
from ..obligation import Checked, ObligationCheck
from . import publish


def check(
    observed: Losses,
    expected: Losses,
    *,
    step: int,
    evaluated: Callable[[], Losses] | None = None,
    rng_after: Sequence[Sequence[str]] = (),
    rng_after_elsewhere: Collection[str] = (),
    tolerance: float = 0.0,
) -> Violation | None:
    """Find the first loss that differs, with its rank and microbatch.

    tolerance: that of a loss, where kernels are not the reference's; 0 is bit for bit. evaluated:
    the losses in evaluation mode, asked for only if they can explain something; rng_after,
    rng_after_elsewhere: see diagnose/loss.py.
    """
    if same(observed, expected, tolerance):
        return None
    bad: list[int] = []
    first: tuple[int, float, float] | None = None
    for rank, (actual, wanted) in enumerate(zip(observed, expected, strict=True)):
        if len(actual) != len(wanted):
            return _violation(
                step,
                (rank,),
                Explanation(
                    f"rank {rank} computed {len(actual)} losses for {len(wanted)} microbatches",
                    (bugs.MICROBATCH_DROPPED,)
                    if len(actual) < len(wanted)
                    else (bugs.MICROBATCH_DOUBLED,),
                ),
            )
        for number, (a, b) in enumerate(zip(actual, wanted, strict=True)):
            if not equal(a, b, tolerance):
                bad.append(rank)
                first = first or (number, a, b)
                break
    assert first is not None
    number, a, b = first
    nan = math.isnan(a) and not math.isnan(b)
    text = f"the loss of microbatch {number} on rank {bad[0]} is not that of one device with the "
    text += "same parameters and samples"
    if nan:
        return _violation(step, tuple(bad), unwritten(f"{text}; it is NaN"), a, b)
    names = causes(
        observed,
        expected,
        None if evaluated is None else evaluated(),
        rng_after,
        rng_after_elsewhere,
    )
    explanation = Explanation.of(names, said(names), text)
    return _violation(step, tuple(bad), explanation, a, b, tolerance)


def check_random(states: Sequence[Sequence[bytes]], mesh: Mesh, *, step: int) -> Violation | None:
    """Check that no two ranks enter a loss in the same random state, where states are carried on.

    Ranks of one data-parallel rank, as along the axis tp, read the same samples, and enter it in
    the same.

    states: [rank][microbatch]. The harness seeded each rank differently, so equal states mean that
    the implementation seeded them alike: their dropout masks are equal. The chance that two
    generators come to one state by themselves is below 2**-19000.
    """
    firsts: dict[int, int] = {}
    for rank, entered in enumerate(states):
        if not entered:  # a stage of a pipeline that computes no loss
            continue
        first = firsts.setdefault(mesh.data_parallel_rank(rank), rank)
        if entered != states[first]:
            return _violation(
                step,
                (first, rank),
                Explanation(
                    f"ranks {first} and {rank} share layers and read the same samples, and "
                    "enter the loss in other random states, so their dropout masks differ",
                    (bugs.TENSOR_PARALLEL_RANKS_SEEDED_APART,),
                ),
            )
    holders: dict[bytes, set[int]] = {}
    for rank, entered in enumerate(states):
        for state in entered if rank in firsts.values() else ():
            holders.setdefault(state, set()).add(rank)
    shared = [ranks for ranks in holders.values() if len(ranks) > 1]
    if not shared:
        return None
    ranks = tuple(sorted(set().union(*shared)))
    return _violation(
        step,
        ranks,
        Explanation(
            "ranks enter the loss in the same random state, so their random numbers (dropout "
            "masks) are equal: they were seeded alike",
            (bugs.SEED_FOR_ALL,),
        ),
    )


def _violation(
    step: int,
    ranks: tuple[int, ...],
    explanation: Explanation,
    observed: float | None = None,
    expected: float | None = None,
    tolerance: float = 0.0,
) -> Violation:
    return Violation(
        obligation="loss",
        step=step,
        role="loss",
        tensors=(),
        ranks=ranks,
        explanation=explanation.text,
        observed=observed,
        expected=expected,
        bound=tolerance,
        causes=explanation.causes,
        sentences=explanation.sentences,
    )


def _check_step(step: StepContext) -> Iterator[Checked]:
    """Judge the losses of a step; once they hold, its passes are right."""
    yield Checked(violation=check_random(step.random, step.case.axes, step=step.index))
    passes = step.passes

    def within(tolerances: Tolerances) -> tuple[float, Violation | None]:
        return 0.0, check(
            step.losses,
            passes.losses,
            tolerance=tolerances.loss,
            step=step.index,
            evaluated=step.evaluated,
            rng_after=step.rng_after,
            rng_after_elsewhere=step.observation.rng_after_elsewhere(step.index),
        )

    _, violation = step.tolerance.judged("loss", within)
    if violation is None:
        step.forward_holds = True
        step.verdicts.vacuity.losses(passes.losses)
    elif _is_stale(step):
        # The forward was that of other parameters, so the loss itself was not exercised.
        text = "" if step.judged.brief else guarded(step.provenance_of_parameters)
        yield Checked(violation=publish.stale(step.index, violation, text))
        return
    else:
        violation = _diagnosed(step, violation)
    yield Checked(violation=violation)


def _diagnosed(step: StepContext, violation: Violation) -> Violation:
    """Add the cause and the attribution of a wrong loss, by the parameters it is of.

    Of those after the first only the cause, and only where the first has one: what a known issue
    makes of every step is that issue.
    """
    first = step.verdicts.violations.get("loss")
    if violation.causes or step.judged.brief or (first is not None and not first.causes):
        return violation
    found = step.with_causes_of_parameters(violation) if named() else violation
    if bugs.PARAMETERS_OF_THE_PREVIOUS_STEP in found.causes:
        return publish.stale(step.index, found)
    if named() and not found.causes and step.case.axes.parts("activations") > 1:
        found = replace(found, causes=(bugs.OTHER_OUTPUTS,))  # a hint: the parameters are right
    if first is not None or found.attribution:
        return found
    return replace(found, attribution=guarded(step.provenance_of_parameters))


def _is_stale(step: StepContext) -> bool:
    """Return True if all ranks computed with the parameters of the step before."""
    if step.earlier is None:
        return False
    stale = step.replay(parameters=step.earlier)
    return same(step.losses, stale.losses, step.tolerance.widest.loss)


LOSS = ObligationCheck("loss", _check_step)
