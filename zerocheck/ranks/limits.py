"""Limit on the number of ranks that this machine can take."""

from __future__ import annotations

from zerocheck.errors import UsageError
from zerocheck.host import available_bytes

RANK_BYTES = 60 << 20
"""What a rank has for itself before any job; the rest it shares with the zygote."""
MOST_RANKS = 250


def check_world_size(world_size: object, *, already: int = 0) -> int:
    """The world size as an int, if that many new ranks fit next to `already` living ones.

    Raises UsageError with the numbers.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise UsageError(f"a world size is a whole number, not {world_size!r}")
    if world_size < 1:
        raise UsageError(f"a world size is at least 1, not {world_size}")
    if world_size > MOST_RANKS:
        raise UsageError(
            f"world size {world_size} is more than {MOST_RANKS} processes on one machine"
        )
    available = available_bytes()
    if available is not None and world_size * RANK_BYTES > available:
        fit = available // RANK_BYTES
        raise UsageError(
            f"world size {world_size} needs about {world_size * RANK_BYTES >> 20} MiB"
            f" ({RANK_BYTES >> 20} MiB a rank), but {available >> 20} MiB are free:"
            f" {fit} ranks would fit next to the {already} that run"
        )
    return world_size
