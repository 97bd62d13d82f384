"""Flat parameter: the parameters of a unit end to end, of which each rank keeps 1/W."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...compat import all_gather_single
from ...contract import Shard
from .bucket import slices, take
from .master import WideMaster
from .partition import Partition, Piece, aligned
from .reduction import Reduction
from .sharded_adamw import OwnedPiece


class FlatParameter:
    """Parameters of one dtype, gathered and released together; all of them train, or none.

    learns    whether they train, now or after they were unfrozen

    shard     1-D, `partition.shard_size` elements: what this rank keeps, and updates
    copy      the same in the dtype of `full` in mixed precision, where `shard` has the masters;
              else None
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
        dtype: torch.dtype | None = None,
        gradients: torch.dtype | None = None,
    ) -> None:
        """dtype: what is gathered in, beside masters; gradients: what they are reduced in. None:
        the parameters' own."""
        self.name = name
        self.group = group
        self.parameters = [parameter for _, parameter in parameters]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        first = self.parameters[0]
        kept = dtype or first.dtype
        self.partition = Partition(shapes, group.size(), aligned(kept.itemsize))
        self.mine = self.partition.shard(group.rank())
        self.pieces: list[Piece] = self.partition.pieces(group.rank())
        self.full = torch.zeros(self.partition.numel, device=first.device, dtype=kept)
        whole = {(name, "parameter"): parameter.detach() for name, parameter in parameters}
        wide = first.dtype
        for parameter, view in zip(self.parameters, self._views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.full[self.mine].clone()
        self.copy: torch.Tensor | None = None
        if dtype is not None and learns:
            self.copy, self.shard = self.shard, torch.zeros_like(self.shard, dtype=wide)
            take(whole, self.pieces, self.shard)
        self.gradient = torch.zeros_like(self.shard, dtype=gradients) if learns else None
        self.widened = None
        if self.gradient is not None:
            self.widened = WideMaster(self.gradient, masters=dtype is not None)
        self.storage = self.full.untyped_storage()
        self._bytes = self.storage.nbytes()
        self._work: dist.Work | None = None
        self.gathered = True
        self.release()

    def gather(self) -> None:
        """Launch the all-gather, unless the parameters are there already or on their way."""
        if not self.gathered:
            self.storage.resize_(self._bytes)
            kept = self.shard if self.copy is None else self.copy
            self._work = all_gather_single(self.full, kept, self.group)
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
        whole = self.gradient.new_zeros(self.partition.numel)
        for parameter, view in zip(self.parameters, self._views(whole), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        reduction.launch(whole, self.mine, self.gradient)

    def unfreeze(self, names: Collection[str]) -> None:
        """Unfreeze the parameters if `names` has them all; it has all or none."""
        if self.partition.shapes[0][0] in names:
            for parameter in self.parameters:
                parameter.requires_grad_(True)

    def reduced(self) -> Iterator[torch.Tensor]:
        """Iterate over the shard of the gradient, unless the parameters are frozen."""
        if self.gradient is not None and self.parameters[0].requires_grad:
            yield self.gradient

    def owned(self) -> list[OwnedPiece]:
        """Return the pieces that this rank updates; none if the parameters are frozen."""
        if self.widened is None:
            return []
        trains = self.parameters[0].requires_grad
        return [
            OwnedPiece(piece, self.shard[piece.inside], self.widened.tensor[piece.inside], trains)
            for piece in self.pieces
        ]

    def refresh(self) -> None:
        """Round the updated masters to the dtype that is gathered."""
        if self.copy is not None:
            self.copy.copy_(self.shard)

    def shards(self) -> Iterator[Shard]:
        """Iterate over the owned slices of the parameters, and the padding."""
        kept = self.shard
        if self.copy is not None:
            yield from slices(self.pieces, "master", self.shard)
            kept = self.copy
        yield from slices(self.pieces, "parameter", kept)
        start = self.mine.start
        for gap in self.partition.padding(start, self.mine.stop):
            held = kept[gap.start - start : gap.stop - start]
            yield Shard(self.name, "padding", held, (self.partition.numel,), gap)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Copy the owned slices of whole parameters into the shard."""
        take(full, self.pieces, self.shard)
        self.refresh()

    def close(self) -> None:
        """Drop everything. The nn.Parameters become empty, since their memory is gone."""
        self._work = None
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = self.shard.new_empty(0)
        self.parameters.clear()

    def _views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return a view of each parameter's elements in a flat buffer, in the parameter's shape."""
        for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True):
            yield flat[offset : offset + parameter.numel()].view(parameter.shape)
