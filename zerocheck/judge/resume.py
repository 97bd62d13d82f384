"""Obligations of a resumed case: saved, exported and loaded state, and the steps after a load.

A checkpoint has no round-off: every comparison here is of bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from ..case.schema import Case
from ..case.segments import only_loads, samples_before, segments_of
from ..protocol.observations import RankObservation
from ..protocol.verdicts import (
    EQUIVALENCE,
    RESUME,
    Gave,
    Judgement,
    Load,
    Obligation,
    Resume,
    Status,
    Violation,
)
from . import vectors
from .assemble import Fetch
from .case import CaseJudge
from .checkpoint import Checkpoint, compare_loaded, compare_saved
from .load_attempts import SegmentObservations, control, tried
from .local import as_on_a_rank
from .obligations.export import check_export
from .rank_device import ran_on
from .state import State


def judge_segments(
    case: Case,
    segments: Sequence[SegmentObservations],
    *,
    done: str = "",
    missing: Sequence[str] = (),
    digest: bool = False,
    brief: bool = False,
) -> Judgement:
    """Judge a resumed case from the ranks' observations of each training segment, in order.

    A segment that only loads comes twice, first with the checkpoint as it was written. done: what
    was done to it afterwards, in words; missing: files of it that a killed writer did not leave;
    brief: as of `judge`.

    The obligations of a step are judged in segment 0. What is wrong in later ones, and was right
    before, is a violation of `continuation`.
    """
    with as_on_a_rank(ran_on(segments[0][0])), torch.no_grad(), vectors.reused():
        violations: dict[Obligation, Violation] = {}
        further: list[Violation] = []
        exercised: set[Resume] = set()
        judgements: list[Judgement] = []
        moved: set[Resume] = set()
        loads: list[Load] = []
        spoilt = False
        checkpoint: Checkpoint | None = None
        for number, segment in enumerate(segments_of(case)):
            observations, fetch = segments[number]
            if number and only_loads(case, number):
                assert checkpoint is not None
                which, wrong = control(segment, segments[number], checkpoint)
                exercised.add(which)
                loads.append(_load(number, {which} if wrong or spoilt else ()))
                if wrong is None:
                    which, gave, wrong = tried(
                        case, segment, segments[number + 1], checkpoint, done, missing
                    )
                    exercised.add(which)
                    loads.append(_load(number, {which} if wrong else (), gave))
                    if gave != "unharmed" and (which, gave) != ("damage", "new"):
                        moved.add(which)
                if wrong is not None and violations.setdefault(which, wrong) is not wrong:
                    further.append(wrong)
                break
            judge = _SegmentJudge(segment, observations, fetch, checkpoint, brief=brief)
            judgement = judge.judgement(digest=digest)
            judgements.append(judgement)
            wrong_here: set[Obligation] = {"roundtrip"} if spoilt else set()
            for violation in (*judge.found, *judgement.violations, *judgement.further):
                of = violation.obligation
                if number and of not in RESUME:
                    if any(v.obligation == of for v in judgements[0].violations):
                        continue  # it is wrong without a checkpoint
                    violation = _after_load(violation, number, segment.training.first)
                if violations.setdefault(violation.obligation, violation) is not violation:
                    further.append(violation)
                if not any(violation is one for one in judge.spoilt):
                    wrong_here.add(violation.obligation)
            spoilt = bool(judge.spoilt)
            if number:
                loads.append(_load(number, wrong_here & {"roundtrip", "continuation"}))
            exercised |= judge.exercised_here
            if "update" not in judgement.vacuous:
                moved |= {"continuation"} if number else {"export", "roundtrip"}
            if not segment.resume:
                break
            if "ownership" in judge.verdicts.violations:
                break
            checkpoint = judge.saved(samples_before(case, number), samples_before(case, number + 1))
        estimated = tuple(dict.fromkeys(o for one in judgements for o in one.estimated))
        statuses: dict[Obligation, Status] = dict(judgements[0].statuses)
        for one in RESUME:
            statuses[one] = (
                "violated"
                if one in violations
                else "holds"
                if one in exercised
                else "not exercised"
            )
        return msgspec.structs.replace(
            judgements[0],
            statuses=statuses,
            violations=tuple(sorted(violations.values(), key=lambda v: v.step)),
            further=tuple(further),
            digest="".join(one.digest for one in judgements),
            vacuous=(
                *judgements[0].vacuous,
                *(one for one in RESUME if statuses[one] == "holds" and one not in moved),
            ),
            estimated=(*estimated, "continuation") if estimated else (),
            loads=tuple(loads),
        )


def _load(segment: int, violated: Collection[Obligation], gave: Gave | None = None) -> Load:
    return Load(
        segment=segment, violated=tuple(one for one in RESUME if one in violated), gave=gave
    )


def _after_load(violation: Violation, number: int, first: int) -> Violation:
    """Return a violation in a loaded segment, as one of `continuation`.

    Before its first step it is one of `roundtrip`.
    """
    before = violation.step < first
    in_step = next((one for one in EQUIVALENCE if one == violation.obligation and not before), None)
    loaded = violation.reworded(lambda text: f"after load {number}, {violation.obligation}: {text}")
    return msgspec.structs.replace(
        loaded,
        obligation="roundtrip" if before else "continuation",
        in_step=in_step,
        parts=tuple(_after_load(one, number, first) for one in violation.parts),
    )


class _SegmentJudge(CaseJudge):
    """Judge of one segment, which begins with the state saved by the segment before."""

    def __init__(
        self,
        case: Case,
        observations: Sequence[RankObservation],
        fetch: Fetch,
        loaded: Checkpoint | None,
        *,
        brief: bool = False,
    ) -> None:
        super().__init__(case, observations, fetch, brief=brief)
        self.loaded = loaded
        self.found: list[Violation] = []
        self.exercised_here: set[Resume] = set()
        self.spoilt: list[Violation] = []
        """What is wrong by saving: it is of the load that reads what was saved."""

    def judgement(self, *, digest: bool) -> Judgement:
        judgement = super().judgement(digest=digest)
        if self.loaded is not None and "ownership" in self.verdicts.violations:
            # Nothing can be put together, so nothing is compared: the load left it so.
            self.exercised_here.add("roundtrip")
        if self.case.resume and "ownership" not in self.verdicts.violations:
            before = self.case.training.first - 1
            if self.observation.held(before, "saved", "parameter") is not None:  # the older one
                self._check_saved(before)
            self._check_saved(self._at)
            if self.observation.ranks[0].declaration.exports:
                self._check(
                    "export", check_export(self.observation, self.layout, self._final(), self._at)
                )
        return judgement

    @property
    def _at(self) -> int:
        """Last step that the checkpoint holds."""
        return self.case.training.steps - 1

    def _final(self) -> State:
        return State.observed(self.observation, self._at)

    def saved(self, before: int, samples: int) -> Checkpoint:
        """Return the state that this segment saved; samples read before it and at the save."""
        return Checkpoint.of(self.observation, self.case, before=before, samples=samples)

    def judge_start(self, before: State) -> None:
        """Judge the state before the first step: that of the checkpoint, if one was loaded."""
        if self.loaded is None:
            super().judge_start(before)
            return
        self.exercised_here |= {"roundtrip", "continuation"}
        self._check(
            "roundtrip",
            compare_loaded(self.loaded, before, self.observation, self.layout, self.case),
        )

    def _check_saved(self, step: int) -> None:
        violation = compare_saved(self.observation, step)
        self._check("roundtrip", violation)
        self.spoilt += [] if violation is None else [violation]

    def _check(self, obligation: Resume, violation: Violation | None) -> None:
        self.exercised_here.add(obligation)
        if violation is not None:
            self.found.append(violation)
