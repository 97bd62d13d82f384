"""Flat buffer: parameters of one dtype end to end, of which each rank updates one shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...case.schema import Case
from ...contract import Shard
from ...contract.shard import Role
from ...optimizers import rule_of
from .partition import Partition, Piece, aligned
from .sharded_optimizer import OwnedPiece

Named = Sequence[tuple[str, nn.Parameter]]


class ShardedBuffer:
    """Parameters as views of one flat buffer, which is partitioned over the ranks of a group."""

    full: torch.Tensor
    """1-D, `partition.numel` elements: every parameter, and padding."""
    mine: slice
    """Location of this rank's shard in `full`."""
    local: torch.Tensor
    """1-D, `partition.shard_size` elements: this rank's shard of `full`."""
    shard: torch.Tensor
    """Elements that this rank updates: `local`, or in mixed precision the fp32 masters of it."""
    gradient: torch.Tensor | None = None
    """This rank's shard of the reduced gradient; None if the parameters are frozen for good."""

    def __init__(
        self,
        name: str,
        named: Named,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None = None,
        *,
        learns: bool = True,
        whole: bool = False,
    ) -> None:
        """Build the buffer.

        Args:
            dtype: of `full`, with separate masters; None: the parameters' own.
            learns: the parameters train, now or after they were unfrozen.
            whole: each parameter has one owner, and is updated in its shape.
        """
        self.whole = whole
        self.name, self.group = name, group
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        kept = dtype or first.dtype
        shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
        self.partition = Partition(shapes, group.size(), aligned(kept.itemsize), whole=whole)
        self.mine = self.partition.shard(group.rank())
        self.pieces = self.partition.pieces(group.rank())
        self.full = torch.zeros(self.partition.numel, device=first.device, dtype=kept)
        given = {(name, "parameter"): parameter.detach() for name, parameter in named}
        wide = first.dtype
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.local = self.shard = self._keep()
        if dtype is not None and learns:
            self.shard = torch.zeros_like(self.local, dtype=wide)
            self._take(given)

    def _keep(self) -> torch.Tensor:
        """Return this rank's shard of `full`."""
        return self.full[self.mine]

    def _take(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Copy the owned slices of whole parameters into the shard."""
        for piece in self.pieces:
            self.shard[piece.inside] = full[piece.name, "parameter"].reshape(-1)[piece.index]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter's elements in a flat buffer, in the parameter's shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True)
        ]

    def owned(self, gradient: torch.Tensor) -> list[OwnedPiece]:
        """Return the pieces that this rank updates; gradient: of the shard."""
        trains = {n: p.requires_grad for n, p in zip(self.names, self.parameters, strict=True)}
        return [
            OwnedPiece(
                piece,
                self._shaped(piece, self.shard),
                self._shaped(piece, gradient),
                trains[piece.name],
            )
            for piece in self.pieces
        ]

    def _shaped(self, piece: Piece, shard: torch.Tensor) -> torch.Tensor:
        """Return a piece of a shard, in the shape of its parameter if it is a whole one."""
        part = shard[piece.inside]
        return part.view(piece.shape) if self.whole else part

    def trains(self) -> bool:
        """Return True if this rank already updates any of its pieces."""
        owned = {piece.name for piece in self.pieces}
        named = zip(self.names, self.parameters, strict=True)
        return any(parameter.requires_grad for name, parameter in named if name in owned)

    @property
    def reduces(self) -> bool:
        """True if a backward now ends with a reduction of the gradient."""
        return True

    def unfreeze(self, names: Collection[str]) -> list[int]:
        """Unfreeze the buffer's parameters among the names, and return their indices."""
        numbers = [number for number, name in enumerate(self.names) if name in names]
        for number in numbers:
            self.parameters[number].requires_grad_(True)
        return numbers

    def refresh(self) -> None:
        """Round the updated masters to the dtype of `full`, if there are any."""
        if self.shard is not self.local:
            self.local.copy_(self.shard)

    def shards(self) -> Iterator[Shard]:
        """Iterate over the parameters as this rank holds them, the masters, and the padding."""
        if self.shard is not self.local:
            yield from self._slices("master", self.shard)

    def _slices(self, role: Role, shard: torch.Tensor) -> Iterator[Shard]:
        """Iterate over the pieces of a shard, as slices of their parameters."""
        for piece in self.pieces:
            yield Shard(piece.name, role, shard[piece.inside], piece.shape, piece.index)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Copy the owned slices of whole parameters into the shard."""
        self._take(full)
        self.refresh()

    def close(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def alike(named: Named, case: Case) -> list[Named]:
    """Group parameters by dtype, and apart from those that the optimizer needs whole, in order.

    A flat buffer has one dtype, and one way to be partitioned.
    """
    kinds = [(parameter.dtype, needs_whole([(n, parameter)], case)) for n, parameter in named]
    return [
        [pair for pair, one in zip(named, kinds, strict=True) if one == kind]
        for kind in dict.fromkeys(kinds)
    ]


def needs_whole(named: Named, case: Case) -> bool:
    """Return True if the optimizer of the case needs each of these parameters whole."""
    return any(rule_of(case.optimizer, name, one.shape).whole for name, one in named)
