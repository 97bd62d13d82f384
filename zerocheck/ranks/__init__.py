"""Rank processes: jobs go to them as bytes, results come back as bytes and tensors.

Nothing here knows what a job means. `Pool` forks ranks on this machine; `torchrun.TorchrunPool`
has the same API over ranks that a launcher started.
"""

from __future__ import annotations

from zerocheck.ranks.context import RankContext
from zerocheck.ranks.in_flight_job import Pending
from zerocheck.ranks.pool import Pool
from zerocheck.ranks.result import JobResult, RankOutcome
from zerocheck.ranks.view import ArenaView, Slot

__all__ = ["ArenaView", "JobResult", "Pending", "Pool", "RankContext", "RankOutcome", "Slot"]
