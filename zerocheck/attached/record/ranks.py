"""Communication between the ranks of a live run: bytes and sums, and no pickles.

An error on one rank must not leave another one waiting. So each operation begins with a meeting of
all ranks, in which a rank that had an error says so, and all leave the operation together with
`Stopped`. `attempt` ends with a meeting too, so that an error after the last operation is heard.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ...errors import UsageError

T = TypeVar("T")


class Total(NamedTuple):
    """Totals of one tensor over all ranks.

    exact: the sum of the gradients; absolute: that of their magnitudes; noise: that of their
    possible errors; arrived: microbatches with a gradient; sway: the total of how far moves of the
    gradients go along them.
    """

    exact: torch.Tensor
    absolute: torch.Tensor
    noise: float
    arrived: int
    sway: float = inf


class Problem(msgspec.Struct, frozen=True):
    """An error of one rank. place: file and line of it; empty where the user can help it."""

    rank: int
    text: str
    place: str = ""


class Stopped(Exception):
    """Attempt that all ranks gave up, since one of them had a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class AllRanks(Protocol):
    """Ranks of a run, seen from one of them. All make the same calls in the same order."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]: ...
    def broadcast(self, data: bytes) -> bytes: ...
    def total(self, share: Total) -> Total: ...
    def exchange(self, part: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]: ...
    def to_first(self, data: bytes, members: Sequence[int]) -> list[bytes]: ...
    def fail(self, problem: Problem) -> Problem: ...


def agreed(value: Any, kind: type[T], ranks: AllRanks) -> T:
    """Return rank 0's value on every rank, as plain data of this type. Every rank calls this."""
    return msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(value)), type=kind)


def attempt(ranks: AllRanks, work: Callable[[], T]) -> T:
    """Do work with all ranks; if one of them has an error, all raise Stopped."""
    try:
        result = work()
        ranks.gather(b"")
    except Stopped:
        raise
    except Exception as error:
        raise Stopped(ranks.fail(_problem(error, ranks.rank))) from error
    return result


def _problem(error: Exception, rank: int) -> Problem:
    if isinstance(error, UsageError):
        return Problem(rank, str(error))
    return Problem(rank, f"{type(error).__name__}: {error}", place_of(error))


def place_of(error: BaseException) -> str:
    """File and line where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


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

    def exchange(self, part: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        return [part]

    def to_first(self, data: bytes, members: Sequence[int]) -> list[bytes]:
        return [data]

    def fail(self, problem: Problem) -> Problem:
        return problem


class RankGroup:
    """Ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Prepare the communication of a process group.

        device: of the model; a group that takes tensors of GPUs alone sends them through it.
        """
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        on_gpu = "nccl" in backend and "gloo" not in backend
        self._device = device if on_gpu else torch.device("cpu")
        self._first = dist.get_global_rank(group, 0) if group is not None else 0
        self._in_collective = False

    def gather(self, data: bytes) -> list[bytes]:
        """Gather each rank's data on rank 0; the others get nothing."""
        sizes = self._meet(len(data))
        longest = max(sizes)
        if not longest:
            return [b""] * self.size
        mine = self._tensor(data, longest)
        into = self._room(longest) if self.rank == 0 else None
        self._call(lambda: dist.gather(mine, into, dst=self._first, group=self._group))
        return [] if into is None else [_bytes(one[:n]) for one, n in zip(into, sizes, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data on every rank."""
        length = self._meet(len(data) if self.rank == 0 else 0)[0]
        if not length:
            return b""
        tensor = self._tensor(data if self.rank == 0 else b"", length)
        self._call(lambda: dist.broadcast(tensor, self._first, group=self._group))
        return _bytes(tensor)

    def total(self, share: Total) -> Total:
        """Return the sum over all ranks, on every rank; on the CPU in the place of `share`."""
        if self.size == 1:
            return share
        few = torch.tensor([share.noise, share.arrived, share.sway], dtype=torch.float64)
        sums = [one.to(self._device) for one in (share.exact, share.absolute, few)]
        self._meet(0)
        for one in sums:
            self._call(partial(dist.all_reduce, one, group=self._group))
        exact, absolute, few = (one.cpu() for one in sums)
        return Total(exact, absolute, float(few[0]), int(few[1]), float(few[2]))

    def exchange(self, part: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return the parts of all ranks, on every rank: flat fp32 on the CPU. lengths: of each."""
        longest = max(lengths)
        if not longest:  # the same on every rank
            return [part] * self.size
        mine = torch.zeros(longest, device=self._device)
        mine[: len(part)] = part
        parts = [torch.empty(longest, device=self._device) for _ in range(self.size)]
        self._meet(0)
        self._call(lambda: dist.all_gather(parts, mine, group=self._group))
        return [one[:length].cpu() for one, length in zip(parts, lengths, strict=True)]

    def to_first(self, data: bytes, members: Sequence[int]) -> list[bytes]:
        """Gather the data of some ranks, one of which this is, on their first; others get nothing.

        members: their numbers. Every rank calls this, with the members of its own.
        """
        sizes = self._meet(len(data))
        first = members[0]
        if self.rank != first:
            mine = self._tensor(data, len(data))
            self._call(lambda: dist.send(mine, group=self._group, group_dst=first))
            return []
        found = [data]
        for rank in members[1:]:
            there = torch.empty(sizes[rank], dtype=torch.uint8, device=self._device)
            self._call(partial(dist.recv, there, group=self._group, group_src=rank))
            found.append(_bytes(there))
        return found

    def fail(self, problem: Problem) -> Problem:
        """Report a problem in the others' next operation, which all of them leave.

        Returns the problem of the first rank that has one.
        """
        if self._in_collective:  # the process group itself failed, so no rank can be informed
            return problem
        try:
            self._meet(0, problem)
        except Stopped as stopped:
            return stopped.problem
        except Exception:
            return problem
        return problem

    def _meet(self, size: int, problem: Problem | None = None) -> list[int]:
        """Exchange the sizes of all ranks. Raises Stopped if a rank has a problem."""
        data = b"" if problem is None else msgspec.msgpack.encode(problem)
        size = -len(data) if problem is not None else size
        all_sizes = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        mine = torch.tensor([size], dtype=torch.int64, device=self._device)
        parts = list(all_sizes.chunk(self.size))
        self._call(lambda: dist.all_gather(parts, mine, group=self._group))
        sizes: list[int] = all_sizes.tolist()
        if min(sizes) < 0:
            texts = self._room(-min(sizes))
            text = self._tensor(data, -min(sizes))
            self._call(lambda: dist.all_gather(texts, text, group=self._group))
            first = next(rank for rank, size in enumerate(sizes) if size < 0)
            sent = _bytes(texts[first][: -sizes[first]])
            raise Stopped(msgspec.msgpack.decode(sent, type=Problem))
        return sizes

    def _call(self, collective: Callable[[], object]) -> None:
        self._in_collective = True
        collective()
        self._in_collective = False

    def _room(self, length: int) -> list[torch.Tensor]:
        device = self._device
        return [torch.empty(length, dtype=torch.uint8, device=device) for _ in range(self.size)]

    def _tensor(self, data: bytes, length: int) -> torch.Tensor:
        padded = bytearray(data.ljust(length, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self._device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
