"""Observations of ranks on other machines, fetched piece by piece through the store.

Rank 0 asks for a slot when the judge wants it, and holds it no longer than the judge does. Replicas
do not travel: rank 0 says which bytes of that length it holds, and the other rank says if its own
are the same.
"""

from __future__ import annotations

import hashlib
import mmap
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from zerocheck.ranks.messages import Message
from zerocheck.ranks.store_mail import StoreMail
from zerocheck.ranks.view import ArenaView, Slot

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zerocheck.ranks.arena import Arena

WHOLE_BYTES = 4 << 20
"""An arena up to this is sent with the reply: asking would take longer."""

PART_BYTES = 64 << 20
"""What is longer is asked for in parts: neither side, nor the store, holds more on its way."""

_OFFERED = 8
"""Tensors of one length that are offered as replicas, the latest first."""


class ByteRange(Message, frozen=True):
    """Bytes [start, stop) of an arena, unless their digest is one of `have`."""

    arena: int
    start: int
    stop: int
    have: list[bytes]


class RemoteBytes(Message, frozen=True):
    """same: place in `have`, or -1 where the bytes follow under a key of their own."""

    same: int


_encode = msgspec.msgpack.Encoder().encode
_ask = msgspec.msgpack.Decoder(ByteRange).decode
_answer = msgspec.msgpack.Decoder(RemoteBytes).decode


def _digest(data: memoryview | bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BytesCache:
    """Tensors that rank 0 has in its hands, by their length in bytes and dtype."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], list[tuple[weakref.ref[Tensor], list[bytes]]]] = {}

    def note(self, tensor: Tensor, dtype: str, digest: bytes | None = None) -> None:
        """Remember it for as long as somebody else holds it."""
        kept = self._alive(tensor.nbytes, dtype)
        kept.insert(0, (weakref.ref(tensor), [] if digest is None else [digest]))
        del kept[_OFFERED:]

    def offers(self, nbytes: int, dtype: str) -> list[tuple[Tensor, bytes]]:
        """(tensor, digest) of those of this length."""
        found = []
        for reference, digests in self._alive(nbytes, dtype):
            tensor = reference()
            if tensor is not None:
                if not digests:
                    digests.append(_digest(memoryview(_bytes_of(tensor))))
                found.append((tensor, digests[0]))
        return found

    def like(self, nbytes: int, dtype: str) -> list[Tensor]:
        """Tensors of this length."""
        found = (reference() for reference, _ in self._alive(nbytes, dtype))
        return [tensor for tensor in found if tensor is not None]

    def _alive(self, nbytes: int, dtype: str) -> list[tuple[weakref.ref[Tensor], list[bytes]]]:
        key = (nbytes, dtype)
        self._held[key] = [one for one in self._held.get(key, []) if one[0]() is not None]
        return self._held[key]


def _bytes_of(tensor: Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class LocalView(ArenaView):
    """A mapped arena whose tensors are offered as replicas."""

    def __init__(self, view: ArenaView, held: BytesCache) -> None:
        super().__init__(view._mapping)
        self._held = held

    def tensor(self, slot: Slot) -> Tensor:
        found = super().tensor(slot)
        if found.nbytes > 0:
            self._held.note(found, slot.dtype)
        return found


def received(data: bytes) -> ArenaView:
    """The arena of a rank on another machine that came as a whole. Pages are aligned, as there."""
    mapping = mmap.mmap(-1, max(1, len(data)))
    mapping[: len(data)] = data
    return ArenaView(mapping)


class RemoteView(ArenaView):
    """The arena of a rank on another machine. Nothing of it is here before it is asked for."""

    def __init__(self, post: Post, rank: int, arena: int, used: int, held: BytesCache) -> None:
        """used: bytes that the rank filled."""
        super().__init__(None)
        self._post = post
        self._rank = rank
        self._arena = arena
        self._used = used
        self._held = held

    def tensor(self, slot: Slot) -> Tensor:
        import numpy as np
        import torch

        dtype = getattr(torch, slot.dtype, None)
        if not isinstance(dtype, torch.dtype) or slot.numel == 0:
            return super().tensor(slot)
        stop = slot.offset + slot.numel * dtype.itemsize
        if slot.offset < 0 or slot.numel < 0 or stop > self._used:
            raise ValueError(f"{slot} lies outside of the arena")
        if stop - slot.offset > PART_BYTES:
            return self._in_parts(slot, dtype, stop)
        offers = self._held.offers(stop - slot.offset, slot.dtype)
        ask = ByteRange(self._arena, slot.offset, stop, [digest for _, digest in offers])
        same, data = self._post.ask(self._rank, ask)
        if data is None:
            return offers[same][0]
        # Aligned, as in the arena: a kernel chooses its path by the address.
        fetched = torch.empty(slot.numel, dtype=dtype)
        fetched.view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._held.note(fetched, slot.dtype)
        return fetched

    def _in_parts(self, slot: Slot, dtype: torch.dtype, stop: int) -> Tensor:
        """A long tensor, part by part. A replica all of whose parts agree is given itself."""
        import numpy as np
        import torch

        replicas = self._held.like(stop - slot.offset, slot.dtype)
        agreed = replicas  # in all parts so far
        fetched: Tensor | None = None
        for start in range(slot.offset, stop, PART_BYTES):
            end = min(start + PART_BYTES, stop)
            part = slice(start - slot.offset, end - slot.offset)
            have = [_digest(_raw(replica)[part]) for replica in replicas]
            same, data = self._post.ask(self._rank, ByteRange(self._arena, start, end, have))
            kept = None if data is not None else have[same]
            still = [
                r
                for r, has in zip(replicas, have, strict=True)
                if has == kept and any(r is one for one in agreed)
            ]
            if fetched is None and not still:
                fetched = torch.empty(slot.numel, dtype=dtype)
                if part.start:
                    _raw(fetched)[: part.start] = _raw(agreed[0])[: part.start]
            agreed = still
            if fetched is not None:
                fresh = (
                    _raw(replicas[same])[part] if data is None else np.frombuffer(data, np.uint8)
                )
                _raw(fetched)[part] = fresh
        if fetched is None:
            return agreed[0]
        self._held.note(fetched, slot.dtype)
        return fetched


def _raw(tensor: Tensor) -> Any:
    """Its bytes, as a NumPy array that shares its memory."""
    import torch

    return tensor.view(torch.uint8).numpy()


class Post:
    """The questions of rank 0, one after the other for each rank."""

    def __init__(self, mail: StoreMail, wait: Callable[[int, str], None]) -> None:
        """wait(rank, key): until the key is there. Raises RanksLost if the rank is gone."""
        self._mail = mail
        self._wait = wait
        self._asked: dict[int, int] = {}

    def ask(self, rank: int, ask: ByteRange) -> tuple[int, bytes | None]:
        """(place in `have`, None), or (-1, the bytes)."""
        number = self._asked[rank] = self._asked.get(rank, 0) + 1
        self._mail.put(f"ask/{rank}/{number}", _encode(ask))
        key = f"answer/{rank}/{number}"
        self._wait(rank, key)
        answer = _answer(self._mail.take(key))
        return answer.same, None if answer.same >= 0 else self._mail.take(f"{key}/bytes")


class Answers:
    """The other rank's side: answers questions that are there, between its jobs."""

    def __init__(self, mail: StoreMail, rank: int) -> None:
        self._mail = mail
        self._rank = rank
        self._answered = 0

    def answer_one(self, arenas: dict[int, Arena]) -> bool:
        """Answer the next question; False if there is none."""
        key = f"ask/{self._rank}/{self._answered + 1}"
        if not self._mail.ready(key):
            return False
        self._answered += 1
        ask = _ask(self._mail.take(key))
        data = arenas[ask.arena].part(ask.start, ask.stop)
        digest = _digest(data) if ask.have else b""
        same = ask.have.index(digest) if digest in ask.have else -1
        reply = f"answer/{self._rank}/{self._answered}"
        if same < 0:
            self._mail.put(f"{reply}/bytes", data)
        self._mail.put(reply, _encode(RemoteBytes(same)))
        return True
