"""Outcome of a case: the verdict on what its ranks did."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from ... import causes as bugs
from ...case.measurement import unmeasured
from ...case.schema import Case
from ...drive.checkpoints import TIE_LOST
from ...errors import HarnessError, Unsupported
from ...judge.case import judge
from ...judge.load_attempts import SegmentObservations
from ...judge.measurements import judge_measured, merged
from ...judge.resume import judge_segments
from ...judge.words import declared, with_words
from ...protocol.replies import MemoryReply
from ...protocol.verdicts import MEMORY, Judgement, Obligation, Status
from ...ranks.result import JobResult, RankOutcome
from ..records.records import Outcome
from .rank_replies import complete, read_observations, received, refusal_of_some_ranks


class Results(NamedTuple):
    """Results of each training segment of a case; only one if it is not resumed.

    A segment that only loads occurs twice, first with the checkpoint as it was written. done: the
    damage done to it, in words; missing: files of a checkpoint that a killed writer did not leave;
    measured: result of the run that is measured, if there was one.
    """

    segments: tuple[JobResult, ...]
    done: str = ""
    measured: JobResult | None = None
    missing: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[JobResult, ...]:
        """Results of each job that is judged."""
        return self.segments if self.measured is None else (*self.segments, self.measured)


def judged(
    case: Case,
    results: Results,
    *,
    obligations: Collection[Obligation] | None = None,
    digest: bool = False,
    words: bool = False,
) -> Outcome:
    """Judge the results of each training segment. Gives the ranks' arenas back."""
    leaks = tuple(dict.fromkeys(leak for result in results.all for leak in result.leaks))
    try:
        outcome = _judged(case, results, obligations=obligations, digest=digest, words=words)
        return msgspec.structs.replace(outcome, leaks=leaks)
    finally:
        for result in results.all:
            result.release()


def _judged(
    case: Case,
    results: Results,
    *,
    obligations: Collection[Obligation] | None,
    digest: bool,
    words: bool,
) -> Outcome:
    for number, result in enumerate(results.all):
        if not complete(result):
            refusal = refusal_of_some_ranks(result)
            if refusal:
                return Outcome(status="unsupported", reason=refusal, seconds=result.duration_s)
            return _broken(case, result, 0 if result is results.measured else number)
    parts = []
    measured: list[MemoryReply] = []
    try:
        segments = [read_observations(result) for result in results.segments]
        if results.measured is not None:
            measured = received(results.measured, MemoryReply)
        started = time.perf_counter()
        if segments:
            parts.append(_judged_steps(case, segments, results, digest=digest, words=words))
    except Unsupported as error:
        return Outcome(status="unsupported", reason=str(error))
    if measured:
        parts.append(judge_measured(case, measured, digest=digest))
    judgement = merged(parts)
    reason = unmeasured(case)
    if reason is not None:
        judgement = _unmeasured(judgement, reason, obligations or ())
    if obligations is not None:
        judgement = _only(judgement, obligations)
    spent = time.perf_counter() - started
    return Outcome(
        status="violated" if judgement.violations else "holds",
        judgement=judgement,
        seconds=sum(result.duration_s for result in results.all) + spent,
        judge_seconds=spent,
    )


def _judged_steps(
    case: Case,
    segments: Sequence[SegmentObservations],
    results: Results,
    *,
    digest: bool,
    words: bool,
) -> Judgement:
    """Return the judgement of all obligations but those of memory."""

    def judgement(
        segments: Sequence[SegmentObservations], *, digest: bool, brief: bool
    ) -> Judgement:
        if case.resume:
            done, missing = results.done, results.missing
            return judge_segments(
                case, segments, done=done, missing=missing, digest=digest, brief=brief
            )
        return judge(case, *segments[0], digest=digest, brief=brief)

    def again(field: str, word: str) -> Judgement:
        other = [(declared(observations, field, word), fetch) for observations, fetch in segments]
        return judgement(other, digest=False, brief=True)

    found = judgement(segments, digest=digest, brief=False)
    return with_words(found, case, again) if words else found


def _unmeasured(judgement: Judgement, reason: str, asked: Collection[Obligation]) -> Judgement:
    """Return the judgement, with memory obligations of an unmeasurable case as unsupported."""
    unjudged = {one: reason for one in MEMORY if one in asked}
    unsupported: dict[Obligation, Status] = dict.fromkeys(unjudged, "unsupported")
    return msgspec.structs.replace(
        judgement, statuses={**judgement.statuses, **unsupported}, unjudged=unjudged
    )


def _broken(case: Case, result: JobResult, begun: int) -> Outcome:
    """Return the outcome of a crash or hang.

    begun: the loads that had begun; a segment that only loads has two of them.
    """
    status: Status = "hung" if result.outcome == "hung" else "crashed"
    error = place = ""
    if result.first_failed is not None:
        failed = result.rank_outcomes[result.first_failed]
        place = failed.place_in_code
        error = failed.type_name or failed.signal_name or f"exit code {failed.exit_code}"
    if status == "crashed" and not error and result.outcome == "finished":
        raise HarnessError(f"a rank gave no reply: {result.summary()}")
    where = f"after load {min(begun, len(case.resume))}: " if begun else ""
    causes = _causes(case, result)
    return Outcome(
        status=status,
        reason=where + result.summary(stacks=False),
        error=error,
        title=where + _title(status, error, result, causes),
        place=place if status == "crashed" else "",
        detail=result.summary(stacks=True),
        causes=causes,
        begun=begun,
        seconds=result.duration_s,
    )


def _causes(case: Case, result: JobResult) -> tuple[str, ...]:
    """Return the cause if a tie was lost, or if ranks called different collectives.

    They wait in different ones; or, in a crash, those of one number, by which calls of ranks are
    matched, differ in kind or size: of a number at which some rank stands. A rank at another number
    may only be ahead, stages of a pipeline call others anyway, and the first error may be another.
    """
    failed = None if result.first_failed is None else result.rank_outcomes[result.first_failed]
    if failed is not None and TIE_LOST in failed.text:
        return (bugs.UNTIED,)
    own = failed is not None and failed.state == "raised" and not _of_a_collective(failed)
    if own or case.axes.has("pp"):
        return ()
    ranks = [one for one in result.rank_outcomes if one.collective]
    last = {one.collective_sequence for one in ranks}
    called = [{one.recent[number] for one in ranks if number in one.recent} for number in last]
    if any(len(digests) > 1 for digests in called):
        return (bugs.DIFFERENT_COLLECTIVES,)
    waiting = {one.collective_sequence for one in ranks if one.state == "waiting"}
    return (bugs.DIFFERENT_COLLECTIVES,) if result.outcome == "hung" and len(waiting) > 1 else ()


_FROM_COLLECTIVES = ("gloo", "distributed_c10d", "_functional_collectives")
"""Words in the message or traceback of a RuntimeError that a collective raises."""


def _of_a_collective(failed: RankOutcome) -> bool:
    """Return True for an error that a wrong collective raises."""
    name, told = failed.type_name.rpartition(".")[2], failed.text + failed.traceback
    from_gloo = name.startswith("RuntimeError") and any(word in told for word in _FROM_COLLECTIVES)
    return from_gloo or name.startswith("Dist")


def _title(status: Status, error: str, result: JobResult, causes: tuple[str, ...]) -> str:
    """Return the title of a crash or hang. Collectives are known where they were traced."""
    if status == "hung" and causes:
        return f"the ranks hung: they called {bugs.DIFFERENT_COLLECTIVES}"
    if result.first_failed is None:
        return f"the ranks {status}" + (f": {error}" if error else "")
    text = result.rank_outcomes[result.first_failed].text.strip().splitlines()[:1]
    title = ": ".join([error.rpartition(".")[2], *text])
    return f"the ranks {status}: {title}"[:200]


def _only(judgement: Judgement, obligations: Collection[Obligation]) -> Judgement:
    return msgspec.structs.replace(
        judgement,
        statuses={o: s for o, s in judgement.statuses.items() if o in obligations},
        share={o: s for o, s in judgement.share.items() if o in obligations},
        violations=tuple(v for v in judgement.violations if v.obligation in obligations),
        further=tuple(v for v in judgement.further if v.obligation in obligations),
        vacuous=tuple(o for o in judgement.vacuous if o in obligations),
        estimated=tuple(o for o in judgement.estimated if o in obligations),
        loads=tuple(
            msgspec.structs.replace(
                load, violated=tuple(o for o in load.violated if o in obligations)
            )
            for load in judgement.loads
        ),
    )
