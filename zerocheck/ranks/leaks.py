"""Global state that a job left changed on some ranks, in words, and whether they may go on."""

from __future__ import annotations

from collections.abc import Mapping

from zerocheck.ranks.messages import Reply


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
        if len(set(counts.values())) > 1:
            what = f"in process group {name}" if name else "process groups"
            listed = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            if name:
                return f"a collective without its partners {what} (called so far: {listed})"
            return f"{what} that not all ranks made (made so far: {listed})"
    return ""
