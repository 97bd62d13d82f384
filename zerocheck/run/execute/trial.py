"""Trial: one case, run on rank processes and judged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ...case.measurement import unmeasured
from ...case.schema import Case
from ...protocol.jobs import CaseJob, LoadCheckpoint
from ...protocol.observations import RankObservation
from ...protocol.replies import CaseUnsupported
from ...protocol.verdicts import MEMORY, Obligation
from ...ranks.result import JobResult
from ..records.records import Outcome
from .host_memory import granted_bytes, is_small
from .outcome import Results, judged
from .rank_pool import RankPool
from .rank_replies import complete, decode_reply
from .segments import Segments, without_waiting

KILLS = 4
"""Times that a writer is killed, at most, until it is killed before it has finished."""


class Trial:
    """Trial of a case. Create it to submit, call `outcome` to wait and judge.

    The training segments of a resumed case run one after the other, as `result` waits for them.
    Where one of MEMORY is among the obligations, the steps are taken once more and measured; where
    nothing else is, they are measured alone. obligations: those that are judged; None: all but
    MEMORY.
    """

    def __init__(
        self,
        ranks: RankPool,
        implementation: str,
        case: Case,
        *,
        fresh: bool = False,
        trace: bool = False,
        obligations: Collection[Obligation] | None = None,
    ) -> None:
        self.implementation = implementation
        self.case = case
        self._ranks = ranks
        self._fresh = fresh
        self._obligations = obligations
        asked = set(obligations or ())
        if unmeasured(case) and not asked <= set(MEMORY):
            asked -= set(MEMORY)  # see `judged`
        self._segments = Segments(implementation, case, trace=trace)
        self._measures = self._segments.measuring() if asked & set(MEMORY) else None
        self._only_measures = self._measures is not None and asked <= set(MEMORY)
        measured = self._measures if self._only_measures else None
        self._pending = self._submit(measured or self._segments.job(0))

    def _submit(self, job: CaseJob) -> Any:
        payload = msgspec.msgpack.encode(job)
        size, hosts = job.case.world_size, job.case.hosts
        return self._ranks.submit(
            size,
            payload,
            fresh=self._fresh,
            hosts=hosts,
            memory=granted_bytes(job.case),
            code=self.implementation,
        )

    @property
    def single(self) -> bool:
        """True if other trials may be submitted before `result` was called.

        It submits no further jobs then, which would come after those of others.
        """
        first_is_all = self._only_measures or (len(self._segments) == 1 and self._measures is None)
        return first_is_all and is_small(self.case)

    @property
    def done(self) -> bool:
        """True if the ranks are done, as far as is known without polling them."""
        return bool(self._pending.done)

    def result(self) -> Results:
        """Wait for the ranks. Afterwards the next trial may be submitted, then `judged` called."""
        results = [self._ranks.wait(self._pending)]
        if self._only_measures:
            self._segments.remove()
            return Results((), measured=results[0])
        measured = None
        try:
            for number in range(1, len(self._segments)):
                if _ended(results[-1]):
                    break
                control = self._segments.control(number)
                if control is not None:
                    before = results[-1]
                    self._pending = self._submit(control)
                    results.append(without_waiting(self._ranks.wait(self._pending)))
                    if _ended(results[-1]):
                        break
                    self._between(number - 1, before)
                job = self._segments.job(number)
                self._pending = self._submit(job)
                result = self._ranks.wait(self._pending)
                results.append(
                    without_waiting(result) if isinstance(job, LoadCheckpoint) else result
                )
            if self._measures is not None and not _ended(results[-1]):
                self._pending = self._submit(self._measures)
                measured = self._ranks.wait(self._pending)
        finally:
            self._segments.remove()
        return Results(tuple(results), self._segments.done, measured, self._segments.missing)

    def _between(self, number: int, result: JobResult) -> None:
        """Kill the writers of a segment, or damage its checkpoint, if the next one asks for it.

        A later save is often faster than the first. Where it was over before the kill, it is killed
        again at the same share of the time that it took.
        """
        victim = self._segments.victim(number)
        for _ in range(KILLS):
            reply = decode_reply(result.payloads[victim] or b"")
            if not isinstance(reply, RankObservation):
                break
            killed = self._segments.killed(number, reply.checkpoint)
            if killed is None:
                break
            result = self._ranks.wait(self._submit(killed))
            result.release()
            if _ended(result):
                self._segments.done = f"rank {victim} was killed while it saved"
                self._segments.look(number)
                break
        self._segments.damage(number)

    def outcome(self, *, digest: bool = False, words: bool = False) -> Outcome:
        """Wait and judge."""
        return self.judged(self.result(), digest=digest, words=words)

    def judged(self, results: Results, *, digest: bool = False, words: bool = False) -> Outcome:
        """Judge the obligations that were asked for. words: by other semantics too."""
        asked = self._obligations
        return judged(self.case, results, obligations=asked, digest=digest, words=words)


def _ended(result: JobResult) -> bool:
    """Return True if no further training segment can follow: the ranks broke, or refused."""
    if not complete(result):
        return True
    return isinstance(decode_reply(result.payloads[0] or b""), CaseUnsupported)
