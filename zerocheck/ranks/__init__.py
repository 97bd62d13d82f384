"""Rank processes: jobs go to them as bytes, results come back as bytes and tensors.

Nothing here knows what a job means. `Pool` forks ranks on this machine; `torchrun.TorchrunPool`
has the same API over ranks that a launcher started.

- `arena.py`: the rank's side of an arena: tensors in a file that the parent maps too
- `context.py`: context of a job: the rank that its target runs in
- `cores.py`: machine-wide semaphore, so that several runs share the processors
- `device.py`: device of a rank, and the settings before it starts that make runs repeatable
- `failures.py`: exceptions of user code as data, and those that only echo another rank's end
- `heartbeat.py`: heartbeat thread, which reports the position of a rank to rank 0 through the store
- `in_flight_job.py`: in-flight job: the requests sent, and the replies received so far
- `limits.py`: limits on the number of ranks, and on the memory of each
- `messages.py`: messages between parent, zygote and ranks, and their frames on a socket
- `pool.py`: rank processes on this machine: teams by world size, kept while they are sound
- `post_mortem.py`: conversion of the replies of a team, or their absence, to a JobResult
- `progress.py`: position of each rank, in shared memory, without locks
- `remote_arenas.py`: arenas of ranks on other machines, fetched through the store
- `result.py`: result of a job: payloads, tensors, failures, and the state that it left changed
- `scratch.py`: private directories of a pool, their files, and the removal of those of dead pools
- `spawner.py`: the parent's handle on the zygote: start, fork, reap, close
- `store_mail.py`: bytes of any length through a c10d store
- `team.py`: ranks of one process group, as the parent sees them
- `torchrun.py`: API of the pool over ranks that torchrun started
- `torchrun_rank.py`: one rank under torchrun
- `view.py`: arenas as the parent maps them, and the slots in which tensors are packed
- `watchdog.py`: watchdog: a hang is distinguished from slowness by progress
- `worker.py`: one rank: a forked process that runs job after job
- `zygote.py`: process that imports everything once, then forks ranks on request
"""

from __future__ import annotations

from zerocheck.ranks.context import RankContext
from zerocheck.ranks.in_flight_job import Pending
from zerocheck.ranks.pool import Pool
from zerocheck.ranks.result import JobResult, RankOutcome
from zerocheck.ranks.view import ArenaView, Slot

__all__ = ["ArenaView", "JobResult", "Pending", "Pool", "RankContext", "RankOutcome", "Slot"]
