"""Agreement of all ranks, at the end of a step, on whether each of them reached it.

A script can raise in a step on one rank, catch it, and go on. The others must not wait for that
rank in a collective, since its next one is of the training. So they agree by the store of the
process group. A store has no order: the rank that leaves a step writes so, and the others read it.

Each step has one entry that is written once: "judge" by the last rank that arrives, "leave" by the
first that does not. So all ranks read the same.
"""

from __future__ import annotations

import torch.distributed as dist

from ..compat import numbered_store
from .ranks import AllRanks


class Arrivals:
    """The ends of the steps of one attached run."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take the next number of the group: every rank makes its instances in the same order."""
        self._run, self._store = numbered_store(group, "zerocheck")

    def arrive(self, number: int, ranks: AllRanks) -> bool:
        """Wait for all ranks; return True if the step is judged, equal on all of them."""
        if self._store is None:
            return True
        key = f"{self._run}/{number}"
        if self._store.add(f"{key}/arrived", 1) == ranks.size:
            return self._decide(key, "judge")
        try:
            self._store.wait([key])
        except RuntimeError:  # so long that a collective would have failed too
            return self._decide(key, "leave")
        return self._decide(key, "judge")

    def leave(self, number: int) -> None:
        """Tell the others that this rank left the step."""
        if self._store is not None:
            self._decide(f"{self._run}/{number}", "leave")

    def _decide(self, key: str, decision: str) -> bool:
        assert self._store is not None
        return bool(self._store.compare_set(key, "", decision) == b"judge")
