"""All ranks of a live run: what they send each other is bytes and sums, and no pickles."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from .reduced import Total


class Ranks(Protocol):
    """All ranks of a run, seen from one of them."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]: ...
    def broadcast(self, data: bytes) -> bytes: ...
    def total(self, share: Total) -> Total: ...


class Alone:
    """A run of one process."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data

    def total(self, share: Total) -> Total:
        return share


class Group:
    """The ranks of a process group; every rank makes the same calls."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """device: of the model; where the group takes tensors of GPUs alone, they go through it."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        on_gpu = "nccl" in backend and "gloo" not in backend
        self._device = device if on_gpu else torch.device("cpu")
        self._first = dist.get_global_rank(group, 0) if group is not None else 0

    def gather(self, data: bytes) -> list[bytes]:
        """Rank 0 gets what each rank gives, the others nothing."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        mine = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.all_gather(list(sizes.chunk(self.size)), mine, group=self._group)
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        into = None
        if self.rank == 0:
            into = [
                torch.empty(longest, dtype=torch.uint8, device=self._device)
                for _ in range(self.size)
            ]
        dist.gather(self._tensor(data, longest), into, dst=self._first, group=self._group)
        if into is None:
            return []
        lengths = sizes.tolist()
        return [_bytes(one[:n]) for one, n in zip(into, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Every rank gets what rank 0 gives."""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, self._first, group=self._group)
        length = int(size)
        if not length:
            return b""
        tensor = self._tensor(data if self.rank == 0 else b"", length)
        dist.broadcast(tensor, self._first, group=self._group)
        return _bytes(tensor)

    def total(self, share: Total) -> Total:
        """The sum over all ranks, on every rank."""
        few = torch.tensor([share.noise, share.arrived], dtype=torch.float64)
        sums = []
        for one in (share.exact, share.absolute, few):
            there = one.to(self._device, copy=True)
            dist.all_reduce(there, group=self._group)
            sums.append(there.cpu())
        exact, absolute, few = sums
        return Total(exact, absolute, float(few[0]), int(few[1]))

    def _tensor(self, data: bytes, length: int) -> torch.Tensor:
        padded = bytearray(data.ljust(length, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self._device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
