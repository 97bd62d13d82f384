"""`python -m zerocheck.ranks.zygote FD`: imports everything once, then forks ranks on request.

It has one thread, so that fork is safe, and never runs a backward: autograd refuses to work in a
child whose parent has started its threads. CUDA stays untouched for the same reason: once the
driver is asked for as little as the number of devices, no child can use one. Each rank starts its
own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn
from unittest import mock

import msgspec

from zerocheck.machine.garbage import freeze
from zerocheck.machine.warning_filters import relax_warnings
from zerocheck.ranks.context import Target, load_target, prepare
from zerocheck.ranks.messages import (
    Exit,
    Failed,
    Hello,
    Message,
    NotSpawned,
    Ready,
    Reap,
    Reaped,
    Request,
    Spawn,
    Spawned,
    frame,
    receive,
)

_PARENT_POLL_MS = 1000
_LAST_WAIT_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_GENERATIONS = 100
"""Generations of descendants that are ended; a process that forks faster than that is left."""
_WARM_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
)


def main(arguments: Sequence[str]) -> None:
    """Serve the parent at the other end of the given socket until it is gone."""
    began = time.monotonic()
    gc.disable()  # imports make no garbage, and to look for it takes a quarter of their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    _adopt_orphans()
    hello = receive(control, msgspec.msgpack.Decoder(Hello))
    try:
        with _ending_with(hello):
            target = _prepare(hello)
    except BaseException:
        control.sendall(frame(Failed(traceback.format_exc())))
        return
    _Zygote(control, hello, target).serve(began)


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent, a rank, ended before them: else those that made
    a session of their own would be out of reach. On Linux; elsewhere they are left alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def _ending_with(hello: Hello) -> Iterator[None]:
    """End soon after the parent did, though what runs here does not look: imports take seconds."""

    def look(*_: object) -> None:
        if os.getppid() != hello.parent_pid:
            _remove(hello.scratch)
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _PARENT_POLL_MS / 1000, _PARENT_POLL_MS / 1000)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _prepare(hello: Hello) -> Target:
    """Look like the parent, then import and warm what every rank needs."""
    sys.path[:] = hello.sys_path
    if hello.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = hello.python_path
    with contextlib.suppress(OSError):
        os.chdir(hello.directory)
    # Where something asks whether there is a GPU, while it is imported: by NVML, not by the driver.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    relax_warnings()
    target = load_target(hello.target)
    import torch

    torch.set_num_threads(1)
    for name in _WARM_MODULES:
        importlib.import_module(name)
    for name in hello.warm:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # The first optimizer step imports torch._dynamo, which takes a second. It would ask whether a
    # GPU captures a graph.
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
        mock.patch.object(torch.cuda, "is_available", return_value=False),  # up to torch 2.12
    ):
        torch.optim.AdamW([parameter]).step()
    import zerocheck.ranks.worker  # noqa: F401

    prepare(target, hello.preparation)
    sys.stdout.flush()
    sys.stderr.flush()
    freeze()
    return target


class _Zygote:
    def __init__(self, control: socket.socket, hello: Hello, target: Target) -> None:
        self._control = control
        self._hello = hello
        self._target = target
        self._ends: dict[int, float] = {}  # pids not yet reaped -> when seen dead, or 0

    def serve(self, began: float) -> None:
        signal.signal(signal.SIGCHLD, self._note_ends)
        try:
            self._control.sendall(frame(Ready(os.getpid(), time.monotonic() - began)))
            self._loop()
        except (EOFError, ConnectionError):
            pass
        finally:
            # Runs in the zygote alone: ranks leave by os._exit().
            self._kill(list(self._ends))
            deadline = time.monotonic() + _LAST_WAIT_S
            while time.monotonic() < deadline and not all(map(_ended, self._ends)):
                time.sleep(0.002)
            for pid in list(self._ends):  # not every init reaps at once
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            self._ends.clear()
            self._end_orphans()
            _remove(self._hello.scratch)

    def _loop(self) -> None:
        decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            # End of file says that the parent is gone, unless a child that it forked holds its
            # end of the socket: so look at the parent's pid as well.
            if not poll.poll(_PARENT_POLL_MS):
                if os.getppid() != self._hello.parent_pid:
                    return
                continue
            request = receive(self._control, decoder)
            if isinstance(request, Spawn):
                self._spawn(request)
            elif isinstance(request, Reap):
                self._reap(request)

    def _spawn(self, request: Spawn) -> None:
        sockets: list[socket.socket] = []
        while len(sockets) < request.world_size:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, request.world_size)
            if not data:
                raise EOFError
            sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for sock in sockets:  # a program that a rank starts would keep it open when that is dead
            sock.set_inheritable(False)
        pids: list[int] = []
        answer: Message = Spawned(request.ticket, pids)
        try:
            self._fork(request, sockets, pids)
        except OSError as error:  # no memory, or no further process may be started
            self._end(pids)
            words = error.strerror or str(error)
            answer = NotSpawned(request.ticket, error.errno or 0, words)
        finally:
            for sock in sockets:
                sock.close()
        self._control.sendall(frame(answer))

    def _fork(self, request: Spawn, sockets: Sequence[socket.socket], pids: list[int]) -> None:
        """Fork the ranks, and note each in `pids`. Raises OSError."""
        zygote = os.getpid()
        for rank, sock in enumerate(sockets):
            pid = os.fork()
            if pid == 0:
                self._become_rank(request, rank, sock, sockets, zygote)
            self._ends[pid] = 0.0
            pids.append(pid)

    def _become_rank(
        self,
        request: Spawn,
        rank: int,
        own: socket.socket,
        sockets: Sequence[socket.socket],
        zygote: int,
    ) -> NoReturn:
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for sock in sockets:
                if sock is not own:
                    sock.close()
            from zerocheck.ranks.worker import run

            run(self._target, request, rank, own, zygote)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _note_ends(self, *_: object) -> None:
        """Note when each child died, but do not reap: its pid must stay taken."""
        now = time.monotonic()
        for pid, end in self._ends.items():
            if not end and _ended(pid):
                self._ends[pid] = now

    def _reap(self, request: Reap) -> None:
        pids = [pid for pid in request.pids if pid in self._ends]
        deadline = time.monotonic() + request.patience_s
        while time.monotonic() < deadline and not all(_ended(pid) for pid in pids):
            time.sleep(0.002)
        exits = self._end(pids)
        self._end_orphans()
        self._control.sendall(frame(Reaped(request.ticket, exits)))

    def _end(self, pids: Sequence[int]) -> list[Exit]:
        """End ranks and reap them."""
        self._note_ends()
        running = {pid for pid in pids if not _ended(pid)}
        self._kill(pids)
        exits = []
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            at = self._ends.pop(pid) or time.monotonic()
            exits.append(Exit(pid, os.waitstatus_to_exitcode(status), at, pid in running))
        return exits

    def _end_orphans(self) -> None:
        """End what ranks that are gone left running, the descendants of that as well.

        Those in the process group of a rank that lives are its own.
        """
        for _ in range(_GENERATIONS):
            orphans = [pid for pid in _children() if pid not in self._ends]
            orphans = [pid for pid in orphans if _group(pid) not in self._ends]
            if not orphans:
                return
            for pid in orphans:
                # One of another user cannot be ended, and is not waited for.
                with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _kill(self, pids: Sequence[int]) -> None:
        """Kill ranks with their process groups: their own children must not outlive them."""
        for pid in pids:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)


def _remove(directories: Sequence[str]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _children() -> list[int]:
    """Processes whose parent this one is; none where the kernel lists none."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]
    return []


def _group(pid: int) -> int:
    """Its process group, 0 if it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _ended(pid: int) -> bool:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, pid, flags) is not None
    except ChildProcessError:
        return True


if __name__ == "__main__":
    main(sys.argv[1:])
