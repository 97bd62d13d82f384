"""Rank processes: jobs go to them as bytes, results come back as bytes and tensors.

Nothing here knows what a job means. `Pool` forks ranks on this machine; `torchrun.TorchrunPool`
has the same API over ranks that a launcher started.
"""

from __future__ import annotations

from zerocheck.ranks.context import RankContext
from zerocheck.ranks.flight import Pending
from zerocheck.ranks.pool import Pool
from zerocheck.ranks.result import JobResult, RankStood
from zerocheck.ranks.slot import Slot
from zerocheck.ranks.view import ArenaView

__all__ = ["ArenaView", "JobResult", "Pending", "Pool", "RankContext", "RankStood", "Slot"]
