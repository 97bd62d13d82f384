"""Reductions of gradients: over the ranks of a copy, in flight, and over copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...compat import reduce_scatter_single, wait
from ...contract import Semantics
from ..shared.meshes import replicate_group

DEPTH = 2
"""Reductions in flight."""


class Reduction:
    """Sums of flat gradients over ranks; the mean of this rank's shard is added to its gradient.

    At most `depth` reductions are in flight: launching one more waits for the oldest first. After
    `make_room` one more whole buffer may be allocated: there are `depth` at most. Waiting depends
    on the program and not on the clock, so that the order is the same on all ranks.
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
        wait(work)
        self.add(part, into)

    def add(self, part: torch.Tensor, into: torch.Tensor) -> None:
        """Add the mean over ranks to a gradient; part: the sum."""
        into.add_(part.div_(self.world_size))

    def clear(self) -> None:
        """Discard all reductions in flight."""
        self._in_flight.clear()


class Replicas:
    """Ranks that hold the same shards as this one; only itself without a replicate axis.

    Each of R replicas is sharded over its own S ranks as on a mesh without that axis, and has
    samples of its own. All that the stages do stays within a replica, except for one
    all-reduce per step: gradient shards are averaged over the ranks that hold the same shard.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = replicate_group(mesh)
        self.count = self.group.size() if self.group is not None else 1

    @property
    def first(self) -> bool:
        """True if this rank is in the first replica, which writes the checkpoint for all."""
        return self.group is None or self.group.rank() == 0

    def semantics(self, semantics: Semantics) -> Semantics:
        """Return the semantics of a step on this mesh: replicas are not reduced each time."""
        if self.group is None or semantics.accumulate != "reduce_each":
            return semantics
        return replace(semantics, accumulate="reduce_shards")

    def average(self, shards: Iterable[torch.Tensor]) -> None:
        """Replace shards of the gradient by their mean over replicas, all in flight at once."""
        if self.count == 1:
            return
        launched = [
            (dist.all_reduce(shard, group=self.group, async_op=True), shard) for shard in shards
        ]
        for work, shard in launched:
            wait(work)
            shard.div_(self.count)
