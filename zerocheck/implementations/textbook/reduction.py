"""Reduce-scatters in flight: launched in the backward, waited for later."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from ...compat import reduce_scatter_single

DEPTH = 2
"""Reductions in flight."""


class Reduction:
    """Sums of flat gradients over ranks; the mean of this rank's shard is added to its gradient.

    At most `depth` reductions are in flight: launching one more waits for the oldest first. Who
    makes room before it allocates the next buffer has `depth` whole ones at most. The waiting
    depends on the program and not on the clock, so that the order is the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, depth: int = DEPTH) -> None:
        self.group = group
        self.depth = depth
        self.world_size = group.size()
        self._in_flight: deque[tuple[dist.Work | None, torch.Tensor, torch.Tensor]] = deque()

    def make_room(self) -> None:
        """Wait until another reduction may be launched."""
        while len(self._in_flight) >= self.depth:
            self._land()

    def launch(self, whole: torch.Tensor, mine: slice, into: torch.Tensor) -> None:
        """Reduce `whole`, which is not read again; add the mean of `whole[mine]` to `into`."""
        self.make_room()
        part = whole[mine]
        self._in_flight.append((reduce_scatter_single(part, whole, self.group), part, into))

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        work, part, into = self._in_flight.popleft()
        if work is not None:
            work.wait()
        into.add_(part.div_(self.world_size))

    def clear(self) -> None:
        """Discard all reductions in flight."""
        self._in_flight.clear()
