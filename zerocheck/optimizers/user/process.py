"""Process that runs steps of the user's optimizer classes, apart from the judge.

The judge holds verdicts, random states and tensors that no code of the user's may touch. One
process, started with the first step and over when the judge is, answers one request after the
other: frames of a length and of msgpack, over a pair of sockets.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from functools import partial

import msgspec
import torch

from ...case.schema import UserOptimizer
from ...errors import Unsupported, UsageError
from ...execution.kernels import deterministic
from ...floating_point import Enclosure, Format
from ...machine.signals import die_with
from ...session_objects import receive_session_code, session_code
from ...user_code import import_user_code
from ..specification import UpdateElements
from ..state_shape import shape_of_user_state
from ..unsharded import step
from ..unsharded.part_norms import NormedPart
from ..unsharded.step import UnshardedScalars

SECONDS = 120.0
"""Longest time that one request may take: round-off is estimated from a dozen steps."""

_LENGTH = struct.Struct("<Q")


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to run one step. Tensors are vectors, fp64, as bytes.

    directory: the judge's, which a relative location is of; session_code: objects that no file
    has; dtype: of the parameter, "float32"; see `UpdateElements` and `UnshardedScalars` for the
    rest.
    """

    user: UserOptimizer
    directory: str
    session_code: bytes
    options: dict[str, float | bool]
    taken: int
    held: bool
    parts: int
    estimated: bool
    part: NormedPart | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    parameter: bytes
    gradient: bytes
    old: dict[str, bytes]


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a request: (exact, bound) of each role, fp64, or the error of the user's code."""

    made: dict[str, tuple[bytes, bytes]] = {}
    error: str = ""


def enclosures(e: UpdateElements, scalars: UnshardedScalars) -> dict[str, Enclosure]:
    """Enclose the states and the parameter after a step, as `step.enclosures`, but elsewhere.

    Raises Unsupported, with the error, where the class fails on a whole parameter.
    """
    user = scalars.user
    assert user is not None
    request = StepRequest(
        user=user,
        directory=os.getcwd(),
        session_code=session_code(),
        options=dict(scalars.options),
        taken=scalars.taken,
        held=e.held,
        parts=e.parts,
        estimated=scalars.estimated,
        part=scalars.part,
        shape=e.shape,
        strides=e.strides,
        dtype=str(e.format.dtype).removeprefix("torch."),
        parameter=_bytes(e.parameter),
        gradient=_bytes(e.gradient),
        old={role: _bytes(state) for role, state in e.old.items()},
    )
    reply = _asked(request)
    if reply.error:
        raise Unsupported(
            f"{user.location}, alone on a whole parameter of shape {e.shape}, {reply.error}"
        )
    return {role: Enclosure(_vector(one), _vector(two)) for role, (one, two) in reply.made.items()}


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.detach().double().reshape(-1).cpu().numpy().tobytes()


def _vector(data: bytes) -> torch.Tensor:
    if not data:  # which torch refuses
        return torch.empty(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(data), dtype=torch.float64)


class _Server:
    """The process, as the judge sees it."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            # Its folders of imports are the judge's, so that a module is found as in a rank.
            code = f"import sys; sys.path[:] = {sys.path!r}; "
            code += f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._socket = mine
        mine.settimeout(SECONDS)

    def ask(self, request: StepRequest) -> StepReply:
        """Send a request and wait for its reply."""
        _send(self._socket, msgspec.msgpack.encode(request))
        return msgspec.msgpack.decode(_received(self._socket), type=StepReply)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_servers: dict[int, _Server] = {}
"""Processes that run steps, by the number of the process that started them: a fork has none."""


def _asked(request: StepRequest) -> StepReply:
    server = _servers.get(os.getpid())
    if server is None:
        server = _servers[os.getpid()] = _Server()
    try:
        return server.ask(request)
    except TimeoutError:
        close()
        return StepReply(error=f"takes more than {SECONDS:g} s for one step")
    except (OSError, EOFError):
        close()
        return StepReply(error="ends the process that runs it")


def close() -> None:
    """End the process, if there is one; the next request starts another."""
    server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.close()


atexit.register(close)


def serve(number: int, parent: int) -> None:
    """Answer requests until the judge closes its end of a socket, whose file descriptor this is."""
    die_with(parent)  # user code may loop for ever
    torch.set_num_threads(1)  # as the ranks
    deterministic()
    with socket.socket(fileno=number) as connection, suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(_received(connection), type=StepRequest)
            _send(connection, msgspec.msgpack.encode(answered(request)))


def answered(request: StepRequest) -> StepReply:
    """Run a step; an error of the user's code is in the reply."""
    user = request.user
    elements = UpdateElements(
        _vector(request.parameter),
        _vector(request.gradient),
        {role: _vector(state) for role, state in request.old.items()},
        {},
        format=Format(getattr(torch, request.dtype), 0.0, 0.0),
        shape=request.shape,
        strides=request.strides,
        held=request.held,
        parts=request.parts,
    )
    names = tuple(one.name for one in user.states)
    try:
        os.chdir(request.directory)
        receive_session_code(request.session_code)
        torch.manual_seed(0)
        scalars = UnshardedScalars(
            import_user_code(user.location),
            request.options,
            names,
            request.taken,
            {},
            {},
            request.estimated,
            partial(shape_of_user_state, user),
            not user.elementwise,
            request.part,
            user,
        )
        made = step.enclosures(elements, scalars)
    except UsageError as error:
        return StepReply(error=f"fails: {error}")
    except Exception as error:
        return StepReply(error=f"fails: {type(error).__name__}: {error}"[:500])
    return StepReply(made={role: (_bytes(one), _bytes(two)) for role, (one, two) in made.items()})


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
