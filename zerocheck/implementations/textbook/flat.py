"""A flat parameter: the parameters of a unit end to end, of which each rank keeps 1/W."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...compat import all_gather_single
from ...contract import Shard
from .partition import Partition, Piece, aligned
from .reduction import Reduction
from .sharded_adamw import Owned


class FlatParameter:
    """Parameters of one dtype, gathered and released together; all of them train, or none.

    learns    whether they train, now or after they were unfrozen

    shard     1-D, `partition.shard_size` elements: what this rank keeps
    gradient  the same for the reduced gradient, or None if the parameters are frozen for good
    full      1-D, `partition.numel` elements: the gathered parameters. Its storage has 0
              bytes while they are released.

    The nn.Parameters are views of `full` for good. Gathering gives the storage its memory back and
    fills it, so whatever autograd saved of them in the forward is right again in the backward.
    Their version counters do not count this, as `full` has one of its own.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        learns: bool,
    ) -> None:
        self.name = name
        self.group = group
        self.parameters = [parameter for _, parameter in parameters]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        first = self.parameters[0]
        self.partition = Partition(shapes, group.size(), aligned(first.element_size()))
        self.mine = self.partition.shard(group.rank())
        self.pieces: list[Piece] = self.partition.pieces(group.rank())
        self.full = torch.zeros(self.partition.numel, device=first.device, dtype=first.dtype)
        for parameter, view in zip(self.parameters, self._views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.full[self.mine].clone()
        self.gradient = torch.zeros_like(self.shard) if learns else None
        self.storage = self.full.untyped_storage()
        self._bytes = self.storage.nbytes()
        self._work: dist.Work | None = None
        self.gathered = True
        self.release()

    def gather(self) -> None:
        """Launch the all-gather, unless the parameters are there already or on their way."""
        if not self.gathered:
            self.storage.resize_(self._bytes)
            self._work = all_gather_single(self.full, self.shard, self.group)
            self.gathered = True

    def wait(self) -> None:
        """Wait until the gathered parameters can be read."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def release(self) -> None:
        """Give back the memory of the gathered parameters."""
        if self.gathered:
            self.wait()
            self.storage.resize_(0)
            self.gathered = False

    def reduce(self, reduction: Reduction) -> None:
        """Launch the reduce-scatter of the local gradients, and let go of them.

        A parameter that the forward did not use counts as 0, and so does padding.
        """
        if self.gradient is None or not self.parameters[0].requires_grad:
            return
        reduction.make_room()
        whole = self.shard.new_zeros(self.partition.numel)
        for parameter, view in zip(self.parameters, self._views(whole), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        reduction.launch(whole, self.mine, self.gradient)

    def unfreeze(self, names: Collection[str]) -> None:
        """Let the parameters train. They are all of `names`, or none is."""
        if self.partition.shapes[0][0] in names:
            for parameter in self.parameters:
                parameter.requires_grad_(True)

    def reduced(self) -> Iterator[torch.Tensor]:
        """The shard of the gradient, unless the parameters are frozen."""
        if self.gradient is not None and self.parameters[0].requires_grad:
            yield self.gradient

    def owned(self) -> list[Owned]:
        """The pieces that this rank updates; none if the parameters are frozen."""
        if self.gradient is None:
            return []
        trains = self.parameters[0].requires_grad
        return [
            Owned(piece, self.shard[piece.inside], self.gradient[piece.inside], trains)
            for piece in self.pieces
        ]

    def shards(self) -> Iterator[Shard]:
        """The owned slices of the parameters, and the padding."""
        for piece in self.pieces:
            index = slice(piece.start, piece.stop)
            yield Shard(piece.name, "parameter", self.shard[piece.inside], piece.shape, index)
        start = self.mine.start
        for gap in self.partition.padding(start, self.mine.stop):
            held = self.shard[gap.start - start : gap.stop - start]
            yield Shard(self.name, "padding", held, (self.partition.numel,), gap)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Take the owned slices of whole parameters."""
        for piece in self.pieces:
            whole = full[piece.name, "parameter"].reshape(-1)
            self.shard[piece.inside] = whole[piece.start : piece.stop]

    def close(self) -> None:
        """Drop everything. The nn.Parameters become empty, since their memory is gone."""
        self._work = None
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = self.shard.new_empty(0)
        self.parameters.clear()

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """A view of each parameter's elements in a flat buffer, in the parameter's shape."""
        for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True):
            yield flat[offset : offset + parameter.numel()].view(parameter.shape)
