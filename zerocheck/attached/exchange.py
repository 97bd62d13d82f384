"""What ranks of a live run send each other for a check: bytes, and no pickles."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from ..errors import HarnessError, UsageError
from ..judge.verdict import Judgement
from .own import judge_own
from .seen import Fetch, Observed, Told
from .together import judge_together

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16,
                                           torch.float64)}  # fmt: skip


class Ranks(Protocol):
    """All ranks of a run, seen from one of them."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]: ...
    def broadcast(self, data: bytes) -> bytes: ...


class Alone:
    """A run of one process."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class Group:
    """The ranks of a process group; every rank makes the same calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        on_gpu = "nccl" in backend and "gloo" not in backend
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
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

    def _tensor(self, data: bytes, length: int) -> torch.Tensor:
        padded = bytearray(data.ljust(length, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self._device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


class _Wish(msgspec.Struct, frozen=True):
    """What rank 0 wants next: a tensor of a rank, or nothing more (rank -1)."""

    rank: int
    what: str = ""
    number: int = 0


def judge_step(observed: Observed | Exception, ranks: Ranks) -> Judgement:
    """The verdict on a step, on every rank. Every rank calls this.

    Where a rank could not observe the step, or rank 0 not judge it, all ranks raise what it says:
    UsageError or HarnessError.
    """
    gathered = ranks.gather(_own(observed))
    if ranks.rank:
        if isinstance(observed, Observed):
            _serve(observed, ranks)
        else:
            _refuse(ranks)
        return _verdict(ranks.broadcast(b""))

    def fetch(rank: int, what: str, number: int) -> torch.Tensor | None:
        wish = _Wish(rank, what, number)
        ranks.broadcast(msgspec.msgpack.encode(wish))
        assert isinstance(observed, Observed)
        return _decoded(ranks.gather(_encoded(observed, wish, ranks.rank))[rank])

    verdict = _judged(gathered, fetch)
    ranks.broadcast(msgspec.msgpack.encode(_Wish(-1)))
    return _verdict(ranks.broadcast(msgspec.msgpack.encode(verdict)))


class _Reply(msgspec.Struct, frozen=True):
    """A rank's share of a step, or a verdict: or the reason why there is none."""

    told: Told | None = None
    judgement: Judgement | None = None
    wrong_usage: str = ""
    failed: str = ""


def _own(observed: Observed | Exception) -> bytes:
    try:
        if isinstance(observed, Exception):
            raise observed
        reply = _Reply(told=judge_own(observed))
    except UsageError as error:
        reply = _Reply(wrong_usage=str(error))
    except Exception as error:
        reply = _Reply(failed=f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(reply)


def _judged(gathered: list[bytes], fetch: Fetch) -> _Reply:
    replies = [msgspec.msgpack.decode(one, type=_Reply) for one in gathered]
    for reply in replies:
        if reply.told is None:
            return reply
    try:
        told = [reply.told for reply in replies if reply.told is not None]
        return _Reply(judgement=judge_together(told, fetch))
    except Exception as error:
        return _Reply(failed=f"{type(error).__name__}: {error}")


def _verdict(data: bytes) -> Judgement:
    reply = msgspec.msgpack.decode(data, type=_Reply)
    if reply.wrong_usage:
        raise UsageError(reply.wrong_usage)
    if reply.judgement is None:
        raise HarnessError(f"a checked step could not be judged: {reply.failed}")
    return reply.judgement


def _refuse(ranks: Ranks) -> None:
    """Go along with rank 0, which asks for nothing where a rank has nothing."""
    ranks.broadcast(b"")


def _serve(observed: Observed, ranks: Ranks) -> None:
    """Give rank 0 the tensors that it asks for, until it has enough."""
    while True:
        wish = msgspec.msgpack.decode(ranks.broadcast(b""), type=_Wish)
        if wish.rank < 0:
            return
        ranks.gather(_encoded(observed, wish, ranks.rank))


def _encoded(observed: Observed, wish: _Wish, rank: int) -> bytes:
    value = observed.values.get((wish.what, wish.number)) if rank == wish.rank else None
    if value is None:
        return b""
    return str(value.dtype).encode().ljust(32) + value.view(torch.uint8).numpy().tobytes()


def _decoded(data: bytes) -> torch.Tensor | None:
    if not data:
        return None
    dtype = _DTYPES[data[:32].decode().strip()]
    return torch.frombuffer(bytearray(data[32:]), dtype=torch.uint8).view(dtype)
