"""Result of a job: payloads and tensors, or the place of every rank when it went wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zerocheck.ranks.failures import place_in_users_code
from zerocheck.ranks.messages import Reply
from zerocheck.ranks.view import ArenaView

Outcome = Literal["finished", "crashed", "hung"]
State = Literal["finished", "raised", "killed", "waiting", "running"]


@dataclass(frozen=True)
class RankOutcome:
    """One rank at the end of a job.

    `killed`: it ended without our doing, by `signal_name` or with `exit_code`, or it was
    `disconnected`: its process closed the connection and went on, so it was ended. `waiting` and
    `running`: it had not finished and was stopped by us, asleep or at work. `at_s` is when it
    finished, raised or died, in seconds after the job's first rank began; None for the others.
    `recent`: digests of the names of its last collectives, by sequence number.
    """

    rank: int
    state: State
    at_s: float | None = None
    type_name: str = ""
    text: str = ""
    traceback: str = ""
    echo: bool = False
    signal_name: str = ""
    exit_code: int | None = None
    disconnected: bool = False
    where: str = ""
    collective: str = ""
    collective_sequence: int = 0
    recent: Mapping[int, int] = field(default_factory=dict, repr=False)
    stack: str = ""
    output: str = ""

    @property
    def place_in_code(self) -> str:
        """Innermost call of the user's code, as `"average (my_ddp.py:11)"`, or ""."""
        return place_in_users_code(self.traceback or self.stack or self.output)

    def headline(self) -> str:
        """One line: what happened to the rank, and where, in the user's own code too."""
        if self.state == "raised":
            first, *rest = self.text.strip().splitlines() or [""]
            advice = [line for line in rest if line.startswith("zerocheck: ")]
            what = f"raised {self.type_name}" + (f": {first}" if first else "")
            what += "".join(f" ({line})" for line in advice)
        elif self.disconnected:
            what = "closed its connection (another program in its place?), and was ended"
        elif self.state == "killed":
            what = (
                f"died of {self.signal_name}"
                if self.signal_name
                else f"left with exit code {self.exit_code}"
            )
        else:
            what = {"finished": "finished", "waiting": "waited", "running": "was running"}[
                self.state
            ]
        place = f" at {self.where}" if self.where else ""
        code = self.place_in_code
        if code and self.state != "finished":
            place += f", in {code}"
        if self.collective and self.state != "finished":
            place += f", last collective {self.collective} #{self.collective_sequence}"
        return f"rank {self.rank} {what}{place}"


@dataclass(frozen=True)
class JobResult:
    """The end of a job. Its arenas may be read until `release()`.

    `payloads` and `arenas` hold None for ranks that gave none; a rank that raised has its arena.
    `rank_outcomes` is in rank order. `first_failed` is the rank whose failure came before the
    others', or None. `duration_s` is from the first rank's begin to the last one's end.
    """

    outcome: Outcome
    payloads: tuple[bytes | None, ...]
    arenas: tuple[ArenaView | None, ...]
    rank_outcomes: tuple[RankOutcome, ...]
    duration_s: float
    first_failed: int | None = None
    reason: str = ""
    leaks: tuple[str, ...] = ()
    """Global state that the job left changed, in words: "left grad mode off on rank 1"."""
    team: int = 0
    """Number of the rank processes that ran it; other jobs may have run on them before."""
    _release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.rank_outcomes)

    def release(self) -> None:
        """Give the arenas back for later jobs. Calling it again does nothing."""
        if self._release is not None:
            self._release()

    def summary(self, *, stacks: bool = True) -> str:
        """Plain text: the outcome, where each rank stood, and the stacks and output."""
        lines = [f"{self.outcome} after {self.duration_s:.3g} s" + self._because()]
        lines += [f"  {outcome.headline()}" for outcome in self.rank_outcomes]
        if stacks and self.outcome != "finished":
            texts: dict[tuple[str, str], list[str]] = {}
            for outcome in self.rank_outcomes:
                for title in ("traceback", "stack", "output"):
                    text = getattr(outcome, title).strip()
                    if text:
                        texts.setdefault((title, text), []).append(str(outcome.rank))
            for (title, text), ranks in texts.items():
                who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
                body = "\n".join(f"    {line}" for line in text.splitlines())
                lines.append(f"  {title} of {who}:\n{body}")
        return "\n".join(lines)

    def _because(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        if self.first_failed is not None:
            reason += f"; rank {self.first_failed} failed first"
        return reason


def at_one_place(outcomes: Sequence[RankOutcome]) -> bool:
    """Return True if all ranks wait in the same collective, or before any: as slow ones do.

    Ranks that left one out, or called another, stand apart.
    """
    places = {
        (rank.state, rank.where, rank.collective, rank.collective_sequence) for rank in outcomes
    }
    return len(places) == 1 and outcomes[0].state == "waiting"


def first_to_fail(outcomes: tuple[RankOutcome, ...]) -> int | None:
    """The rank that failed on its own account, and of several the earliest.

    A rank's sockets close a moment before its death is seen, so a peer's "connection closed"
    may bear the earlier time: an echo counts only if nothing else is there.
    """
    failed = [one for one in outcomes if one.state in ("raised", "killed")]
    if not failed:
        return None
    return min(failed, key=lambda one: (one.echo, one.at_s or 0.0, one.rank)).rank


def signal_name(code: int) -> str:
    """ "SIGABRT" for -6, and nothing for an exit code that is no signal."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def once(action: Callable[[], None]) -> Callable[[], None]:
    """`action`, at most once."""
    todo = [action]

    def run() -> None:
        while todo:
            todo.pop()()

    return run


def fit(replies: Mapping[int, Reply]) -> bool:
    """Return True if ranks may do another job: each is clean, and collectives are paired."""
    return all(reply.fit for reply in replies.values()) and not _disagreement(replies)


def leaks_of(replies: Mapping[int, Reply], *, replaced: bool = True) -> tuple[str, ...]:
    """In words, each with the ranks where not all of them did it. replaced: unfit ranks are."""
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, reply in sorted(replies.items()):
        for leak in reply.leaks:
            ranks.setdefault((leak.words, leak.undone), []).append(rank)
    remedy = "so its ranks were replaced" if replaced else "and it cannot be undone"
    lines = []
    for (words, undone), which in ranks.items():
        where = "" if len(which) == len(replies) else f" on rank {', '.join(map(str, which))}"
        lines.append(f"{words}{where}" + ("" if undone else f", {remedy}"))
    disagreement = _disagreement(replies)
    # Ranks that raised or refused may stand anywhere.
    if disagreement and not any(reply.error for reply in replies.values()):
        remedy = "so its ranks were replaced" if replaced else "so they got a new process group"
        lines.append(f"left {disagreement}, {remedy}")
    return tuple(lines)


def _disagreement(replies: Mapping[int, Reply]) -> str:
    """Name the process group in which ranks called different numbers of collectives, or ""."""
    collectives = {rank: reply.collectives for rank, reply in replies.items() if reply.collectives}
    for name in sorted({name for counts in collectives.values() for name in counts}):
        counts = {rank: one[name] for rank, one in sorted(collectives.items()) if name in one}
        group = name.removesuffix(" sent")
        if group != name and sum(counts.values()) != 0:
            return f"a collective without its partners in process group {group} (send or recv)"
        if group == name and len(set(counts.values())) > 1:
            what = f"in process group {name}" if name else "process groups"
            listed = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            if name:
                return f"a collective without its partners {what} (called so far: {listed})"
            return f"{what} that not all ranks made (made so far: {listed})"
    return ""
