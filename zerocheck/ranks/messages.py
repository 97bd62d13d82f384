"""The messages between parent, zygote and ranks, and how they are framed on a socket.

A frame is the length of its body (8 bytes, little-endian) and the body (MessagePack).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")
LONGEST_BYTES = 1 << 32
"""No reply is longer: who says so did not write the frame."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Parent to zygote, first. `scratch` is removed by the zygote when the parent is gone.

    warm: modules to import once for all ranks, in addition to those that every rank needs;
    preparation: what the target's `prepare` gets.
    """

    parent_pid: int
    target: str
    sys_path: list[str]
    python_path: str | None
    directory: str
    scratch: list[str]
    warm: list[str]
    preparation: bytes = b""


class Spawn(Message, frozen=True):
    """Fork one rank per socket; the sockets follow the frame as file descriptors.

    hosts: on which hosts the ranks are to believe themselves, as in a case; device, backend: as of
    the pool.
    """

    ticket: int
    world_size: int
    hosts: tuple[int, ...]
    directory: str
    board: str
    arena_directories: list[str]
    device: str = "cpu"
    backend: str | None = None


class Reap(Message, frozen=True):
    """Kill what still lives of `pids` after `patience_s`, and wait for all of them."""

    ticket: int
    pids: list[int]
    patience_s: float


class Ready(Message, frozen=True):
    """Zygote to parent: everything is imported."""

    pid: int
    seconds: float


class Failed(Message, frozen=True):
    """Zygote to parent: the imports failed; the zygote exits."""

    text: str


class Spawned(Message, frozen=True):
    ticket: int
    pids: list[int]


class NotSpawned(Message, frozen=True):
    """Zygote to parent: a rank could not be forked, and those before it were ended."""

    ticket: int
    number: int
    text: str


class Exit(Message, frozen=True):
    """End of a rank: `code` is negative for a signal; `at` is time.monotonic() when seen."""

    pid: int
    code: int
    at: float
    ended: bool = False
    """True if it did not end by itself, and was killed."""


class Reaped(Message, frozen=True):
    ticket: int
    exits: list[Exit]


class JobMessage(Message, frozen=True):
    """Parent to rank. Sequence numbers count from 1 in each team.

    `floor` is the last job whose replies the parent had all seen when it sent this one: a rank
    does not start if a job after `floor` raised on any rank. hosts: as in a case.
    """

    sequence: int
    floor: int
    payload: bytes
    arena: int
    hosts: tuple[int, ...] = ()
    room: int = 0
    """Bytes of memory that the rank may take for it: see limits.py."""


class Raised(Message, frozen=True):
    """An exception of the target. `harness` when it is ours and not the target's."""

    type_name: str
    text: str
    traceback: str
    harness: bool = False


class Leak(msgspec.Struct, frozen=True, array_like=True):
    """Global state that a job left changed in its process. undone: it is again as before the job.

    words: `"left grad mode off"`.
    """

    words: str
    undone: bool


class Reply(Message, frozen=True):
    """Rank to parent. Times are time.monotonic() in seconds, comparable on one machine.

    With `started` false the job did not run, since an earlier one raised somewhere. leaks,
    collectives: as of `context.Condition`. place_read: whether this process has ever read on which
    host it is.
    """

    sequence: int
    started: bool
    began: float
    ended: float
    payload: bytes | None
    error: Raised | None
    arena_path: str
    arena_bytes: int
    leaks: list[Leak] = []
    collectives: dict[str, int] = {}
    place_read: bool = False

    @property
    def fit(self) -> bool:
        """True if the rank may do another job."""
        return all(leak.undone for leak in self.leaks)


Request = Hello | Spawn | Reap
Answer = Ready | Failed | Spawned | NotSpawned | Reaped


def frame(message: Message) -> bytes:
    """The bytes of one framed message."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Block until one whole message is there, reading no byte beyond it.

    Raises EOFError when the other end is closed.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return decoder.decode(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    first = sock.recv(count)
    if len(first) == count:
        return first
    data = bytearray(first)
    while len(data) < count:
        chunk = sock.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError("the other end of the socket is closed")
        data += chunk
    return bytes(data)


class Inbox:
    """Collects what a non-blocking socket delivers into whole bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """Add `chunk`; yield the body of every frame that is now whole.

        Raises ValueError for a length that no frame has.
        """
        data = self._data
        data += chunk
        start = 0
        while len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > LONGEST_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if len(data) < end:
                break
            yield bytes(data[start + _LENGTH.size : end])
            start = end
        del data[:start]
