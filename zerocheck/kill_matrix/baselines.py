"""Usual checks of sharded training on a case, by its loss curve and by its parameters.

Both let the sharded code and a single-device trainer run some steps (`freely`) from the same start
on the same samples, and compare the results with a tolerance:

- loss curve: the mean loss of each step, over ranks and microbatches, at LOSS_RTOL. It stands for
  two curves laid on top of each other, and is stricter than eyes are.
- parameters: torch.testing.assert_close with its defaults, as the parity tests of FSDP do, on what
  each rank holds and on the whole that is put together from it.

The same observation is judged too, so that all three look at one and the same run.

They are given a lot that they would have to find for themselves: a case in which the fault acts,
the same initial weights, samples, dropout masks and state of mid-training, the semantics of the
sharded code, and memory that is filled with NaN before it is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from ..case.schema import Case
from ..case.shapes import sometimes_used, uncalled
from ..contract.semantics import Semantics
from ..errors import Unsupported
from ..judge.assemble import Fetch, Observation
from ..judge.case import judge
from ..judge.free_run import Trajectory, trajectory
from ..judge.layout import ParameterLayout
from ..machine.devices import CPU
from ..models.network import build_model
from ..protocol.observations import RankObservation
from ..run.execute.free_runs import copies, fixes, mean_loss
from ..run.execute.outcome import Results
from ..run.execute.rank_replies import complete, read_observations
from ..run.findings.consequences import independent
from ..run.records.matrix_records import Rivals

LOSS_RTOL = 1e-4
"""Relative. Losses are logged with 4 digits or so, and curves are compared by eye."""


def usual_start(case: Case, fixed: Mapping[str, object]) -> Case:
    """Return the case as tests mostly start: at step 0, with moments of 0 and an unscaled loss.

    A maximum norm stays equal in units of the loss.
    """
    if "start" not in fixed:
        case = replace(case, start=replace(case.start, step=0, moments="zero"))
    if fixes(fixed, "data", "loss_factor") or fixes(fixed, "training", "clip"):
        return case
    clip = case.training.clip
    return replace(
        case,
        data=replace(case.data, loss_factor=1.0),
        training=replace(case.training, clip=clip and clip / case.data.loss_factor),
    )


class FreeRuns:
    """Comparison of free runs with those of the reference, computed once for each case."""

    def __init__(self) -> None:
        self._reference: dict[tuple[Case, Semantics, bool], Trajectory] = {}
        self._device = torch.device(CPU)

    def rivals(self, case: Case, results: Results) -> Rivals:
        """Return the results of the rivals on a finished case. Gives the ranks' arenas back."""
        (result,) = results.segments
        try:
            if not complete(result):
                outcome = "hung" if result.outcome == "hung" else "crashed"
                return Rivals(outcome=outcome, reason=result.summary(stacks=False))  # type: ignore[arg-type]
            try:
                observations, fetch = read_observations(result)
                readings = self._readings(case, observations[0])
                found = all_agree([compare(case, observations, fetch, one) for one in readings])
                violations = judge(case, observations, fetch).violations
            except Unsupported as refusal:
                return Rivals(outcome="unsupported", reason=str(refusal))
            first = independent(violations)[0].obligation if violations else ""
            return replace(found, flagged=first)
        finally:
            result.release()

    def _readings(self, case: Case, observation: RankObservation) -> Iterator[Trajectory]:
        """Yield a free run of the reference for each reading that the semantics allow.

        Where no rank used a parameter, a gradient that may count as 0 need not exist either.
        """
        semantics = Semantics(**observation.declaration.semantics)  # type: ignore[arg-type]
        self._device = torch.device(observation.device)
        yield self._of(case, semantics, restored=observation.restored)
        unused = uncalled(case.model) or sometimes_used(case.model)
        if unused and semantics.unused == "zero":
            other = dataclasses.replace(semantics, unused="skip")
            yield self._of(case, other, restored=observation.restored)

    def _of(self, case: Case, semantics: Semantics, *, restored: bool) -> Trajectory:
        key = (case, semantics, restored)
        if key not in self._reference:
            self._reference[key] = trajectory(
                case, semantics, restored=restored, device=self._device
            )
        return self._reference[key]


def compare(
    case: Case, observations: Sequence[RankObservation], fetch: Fetch, reference: Trajectory
) -> Rivals:
    """Return the results of the rivals, given the free run of the reference."""
    last = case.training.steps - 1
    off = [
        _deviation(mean_loss(rank.steps[step] for rank in observations), reference.losses[step])
        for step in range(last + 1)
    ]
    observation = Observation(ParameterLayout.of(build_model(case), case), observations, fetch)
    refused, deviation = _refused(observation, last, reference.parameters)
    return Rivals(
        outcome="finished",
        loss_step=next((step for step, one in enumerate(off) if not one <= LOSS_RTOL), None),
        loss_deviation=max((math.inf if math.isnan(one) else one for one in off), default=0.0),
        refused=refused,
        deviation=deviation,
    )


def all_agree(found: Sequence[Rivals]) -> Rivals:
    """Return the alarms that every reading of the semantics raises, parameter by parameter."""
    first, *others = found
    quiet = any(not one.loss_alarm for one in others)
    return replace(
        first,
        loss_step=None if quiet else first.loss_step,
        loss_deviation=min(one.loss_deviation for one in found),
        refused=tuple(n for n in first.refused if all(n in one.refused for one in others)),
        deviation=min(one.deviation for one in found),
    )


def _deviation(got: float, expected: float) -> float:
    """Return the relative deviation; 0 where both overflow alike."""
    if got == expected:
        return 0.0
    return abs(got - expected) / abs(expected) if expected else math.inf


def _refused(
    observation: Observation, step: int, expected: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], float]:
    """Return the parameters that assert_close refuses after a step, and the largest difference."""
    try:
        held = observation.held(step, "state", "parameter")
        given = [] if held is None else list(copies(held))
    except (KeyError, IndexError, RuntimeError):
        given = []  # shards that do not go together: unknown names, shapes that do not fit
    if not given:
        return tuple(expected), math.inf
    refused: dict[str, None] = {}
    deviation = 0.0
    for whole in given:
        for place in observation.layout.places:
            wanted = expected[place.name].reshape(-1)
            part = whole[place.start : place.stop].to(wanted.dtype)
            try:
                torch.testing.assert_close(part, wanted)
            except AssertionError:
                refused[place.name] = None
            if wanted.numel():
                far = float((part.double() - wanted.double()).abs().max())
                deviation = max(deviation, math.inf if math.isnan(far) else far)
    return tuple(refused), deviation
