"""In-flight job: the requests sent, and the replies received so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerocheck.machine.host import denials
from zerocheck.ranks.messages import JobMessage, Reply, frame
from zerocheck.ranks.result import JobResult


def denied() -> tuple[int, ...]:
    """Return how many processes and how much memory control groups have denied so far."""
    return denials("pids"), denials("memory")


@dataclass
class InFlightJob:
    """A job from submit to result. It may be sent twice: when a job before it broke its team."""

    world_size: int
    payloads: Sequence[bytes]
    fresh: bool
    hosts: tuple[int, ...] = ()
    room: int = 0
    """Bytes of memory that each rank may take for it; 0 for no bound."""
    code: str = ""
    """Name of the code under test, where that is known."""
    sequence: int = 0
    arena: int = 0
    sent_at: float = 0.0
    early_deaths: int = 0
    """Teams that died before they began it."""
    replies: dict[int, Reply] = field(default_factory=dict)
    result: JobResult | None = None
    denied: tuple[int, ...] = ()
    """Counts of what control groups had denied when the job was sent: see machine/shortage.py."""
    repeated: bool = False
    """True once it was put back for want of room."""
    lost: str = ""
    """Why there will be no result, if so."""

    def prepare(self, sequence: int, arena: int, floor: int) -> list[bytes]:
        """The framed job of each rank."""
        self.sequence, self.arena = sequence, arena
        self.sent_at = time.monotonic()
        self.denied = denied()
        self.replies.clear()
        return [
            frame(JobMessage(sequence, floor, payload, arena, self.hosts, self.room))
            for payload in self.payloads
        ]

    def unfinished(self, gone: frozenset[int]) -> list[int]:
        """Ranks that live and have not replied."""
        return [r for r in range(self.world_size) if r not in self.replies and r not in gone]

    @property
    def kind(self) -> tuple[int, tuple[int, ...]]:
        """Jobs of one kind share a team."""
        return self.world_size, self.hosts

    @property
    def complete(self) -> bool:
        return len(self.replies) == self.world_size

    @property
    def put_back(self) -> bool:
        """True if the ranks refused to start it, since a job before it raised."""
        return any(not reply.started for reply in self.replies.values())

    @property
    def raised(self) -> list[Reply]:
        return [reply for reply in self.replies.values() if reply.error is not None]


class Pending:
    """A submitted job. Give it to `Pool.wait`."""

    def __init__(self, job: InFlightJob) -> None:
        self._job = job

    @property
    def done(self) -> bool:
        """True if the result is there already, as far as the pool has looked."""
        return self._job.result is not None
