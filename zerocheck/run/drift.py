"""Drift of implementations in free runs: which cases are run, and the results.

AdamW divides by a root of squares, so two correct trainers drift apart, and no bound on that can be
derived. So this informs: a replica of the reference with other round-off takes the same steps, and
both distances are shown next to each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec.structs import replace

from ..case.schema import Case, Disturbance, Precision
from ..case.shapes import parameter_dtypes, parameter_elements, sometimes_used, uncalled
from ..contract.semantics import Semantics
from ..errors import Unsupported
from ..judge.assemble import Fetch, Observation
from ..judge.free_run import Trajectory, trajectory
from ..judge.layout import ParameterLayout
from ..models.network import build_model
from ..protocol.observations import RankObservation
from ..ranks.result import JobResult
from .execute.free_runs import copies, free_run_case, mean_loss
from .execute.rank_pool import RankPool
from .execute.rank_replies import complete, read_observations
from .execute.trial import Trial
from .findings.bug import Bug
from .records.records import CaseFinished, Drift, FreeRun

CASES = 24
"""An implementation with fewer judged cases is not left to itself: that would be a large part of
its run. It takes about as long as one case."""

FINDINGS = 4
"""Of a run, whose cases are left to themselves."""

ELEMENTS = 1 << 20
"""Parameters. A case with more takes too long."""

ORDERED = 3
"""Ranks from which the order of a sum counts: two terms are the same in either order."""

SLOW = 5
"""Ranks from which a case is slow."""


def comparable(case: Case) -> bool:
    """Return True if a free run of the reference is what the case should result in.

    That is in fp32, where dropped gradients cannot be read in two ways, and without checkpoints.
    """
    return (
        not case.resume
        and case.precision == Precision()
        and case.training.compile == "none"
        and set(parameter_dtypes(case.model).values()) <= {"fp32"}
        and not (uncalled(case.model) or sometimes_used(case.model))
        and parameter_elements(case.model) <= ELEMENTS
    )


class DriftRuns:
    """Choice of cases as they are judged, and their free runs at the end of a run.

    fixed: by implementation, the fields of cases that it fixes.
    """

    def __init__(self, ranks: RankPool, fixed: Mapping[str, Mapping[str, object]]) -> None:
        self._ranks = ranks
        self._fixed = fixed
        self._judged: Counter[str] = Counter()
        self._chosen: dict[str, Case] = {}

    def note(self, record: CaseFinished) -> None:
        """Note a judged case; of those that hold, keep the one with the most round-off to show."""
        name, case = record.implementation, record.case
        self._judged[name] += record.judgement is not None
        if record.status != "holds" or case.world_size == 1 or not comparable(case):
            return
        best = self._chosen.get(name)
        if best is None or _worth(case) > _worth(best):
            self._chosen[name] = case

    def results(self) -> Iterator[Drift]:
        """Yield the drift of one case that held, for each implementation with enough cases."""
        for name, case in self._chosen.items():
            if self._judged[name] >= CASES:
                yield self._driven(name, replace(case, disturbance=Disturbance()))

    def of_findings(self, bugs: Sequence[Bug]) -> Iterator[Drift]:
        """Yield the drift of the first findings of a violated step that show every time."""
        left = FINDINGS
        for number, bug in enumerate(bugs):
            case, violation = bug.replayed.case, bug.shown_violation
            sure = bug.issue is None and 0 < bug.confirmed == bug.tries
            if violation is None or not sure or not left or not comparable(case):
                continue
            left -= 1
            drift = self._driven(bug.implementation, case)
            yield replace(drift, finding=number, parts=max(violation.step, 0))

    def _driven(self, name: str, case: Case) -> Drift:
        return drift(self._ranks, name, free_run_case(case, self._fixed[name]))


def _worth(case: Case) -> tuple[bool, float, int]:
    """Return a key of how much round-off shows: order of sums, size of steps, terms of sums."""
    rate = max(group.lr for group in case.optimizer.groups)
    return ORDERED <= case.world_size < SLOW, rate, case.world_size * case.training.microbatches


def drift(ranks: RankPool, implementation: str, case: Case) -> Drift:
    """Run all steps of a case by an implementation, the reference and its replica."""
    (result,) = Trial(ranks, implementation, case).result().segments
    try:
        found = _compared(case, result)
    finally:
        result.release()
    return replace(found, implementation=implementation)


def _compared(case: Case, result: JobResult) -> Drift:
    if not complete(result):
        return Drift(implementation="", case=case, broken=result.summary(stacks=False))
    try:
        observations, fetch = read_observations(result)
        semantics = Semantics(**observations[0].declaration.semantics)  # type: ignore[arg-type]
        device = torch.device(observations[0].device)
        reference, replica = (
            trajectory(
                case,
                semantics,
                restored=observations[0].restored,
                device=device,
                path=True,
                replica=other,
            )
            for other in (False, True)
        )
    except Unsupported as refusal:
        return Drift(implementation="", case=case, broken=str(refusal))
    return Drift(
        implementation="",
        case=case,
        expected=reference.losses,
        own=_own(case, observations, fetch, reference),
        replica=_replica_run(replica, reference),
    )


def _own(
    case: Case, observations: Sequence[RankObservation], fetch: Fetch, reference: Trajectory
) -> FreeRun | None:
    layout = ParameterLayout.of(build_model(case), case)
    observation = Observation(layout, observations, fetch)
    losses, far = [], []
    for step, expected in enumerate(reference.path):
        losses.append(mean_loss(rank.steps[step] for rank in observations))
        wanted = torch.cat([expected[place.name].reshape(-1).double() for place in layout.places])
        far.append(max(_far(given, wanted) for given in _given(observation, step)))
    largest, relative = zip(*far, strict=True)
    return FreeRun(losses=tuple(losses), largest=largest, relative=relative)


def _given(observation: Observation, step: int) -> list[torch.Tensor]:
    """Return the parameters on ranks after a step, NaN if their shards do not fit together."""
    try:
        held = observation.held(step, "state", "parameter")
        found = [] if held is None else list(copies(held))
    except (KeyError, IndexError, RuntimeError):
        found = []  # unknown names, shapes that do not fit
    return found or [torch.tensor(math.nan)]


def _replica_run(replica: Trajectory, reference: Trajectory) -> FreeRun:
    far = [
        _far(
            *(torch.cat([one[name].reshape(-1).double() for name in other]) for one in (own, other))
        )
        for own, other in zip(replica.path, reference.path, strict=True)
    ]
    largest, relative = zip(*far, strict=True)
    return FreeRun(losses=replica.losses, largest=largest, relative=relative)


def _far(given: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Return (largest |difference|, its 2-norm over that of the expected value); inf for NaN."""
    off = given.double() - wanted
    if not off.numel():
        return 0.0, 0.0
    length = float(wanted.norm())
    far = float(off.norm())
    relative = far / length if length else (math.inf if far else 0.0)
    return _known(float(off.abs().max())), _known(relative)


def _known(value: float) -> float:
    return math.inf if math.isnan(value) else value
