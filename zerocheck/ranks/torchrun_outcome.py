"""Outcome of a rank of torchrun at the end of its job, by its report or its last heartbeat."""

from __future__ import annotations

from dataclasses import replace

from zerocheck.ranks.failures import is_echo
from zerocheck.ranks.heartbeat import Beat
from zerocheck.ranks.result import RankOutcome
from zerocheck.ranks.torchrun_rank import RankReport


def rank_outcome(
    rank: int, report: RankReport | None, beat: Beat | None, *, late: bool
) -> RankOutcome:
    """`at_s` counts from the rank's own begin: clocks of two machines cannot be compared.

    late: what ranks raised was the end of their patience.
    """
    standing = beat if report is None else report.standing
    if standing is None:
        return RankOutcome(rank=rank, state="waiting")
    outcome = RankOutcome(
        rank=rank,
        state="waiting",
        where=standing.where,
        collective=standing.collective,
        collective_sequence=standing.collective_sequence,
        stack=standing.stack if isinstance(standing, Beat) else "",
    )
    if report is None:
        return outcome
    error = report.reply.error
    if late and error is not None:
        return replace(outcome, stack=error.traceback)
    return replace(
        outcome,
        state="finished" if error is None else "raised",
        at_s=report.reply.ended - report.reply.began,
        type_name=error.type_name if error else "",
        text=error.text if error else "",
        traceback=error.traceback if error else "",
        echo=error is not None and is_echo(error),
    )
