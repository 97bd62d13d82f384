"""The parent's handle on the zygote: start it, have it fork and reap, see it off."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from zerocheck.errors import HarnessError
from zerocheck.machine import signals
from zerocheck.machine.devices import CPU
from zerocheck.machine.host import prefer_huge_pages
from zerocheck.ranks.cores import Cores
from zerocheck.ranks.messages import (
    Answer,
    Exit,
    Failed,
    Hello,
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
from zerocheck.ranks.scratch import Scratch
from zerocheck.ranks.watchdog import activity

START_TIMEOUT_S = 300.0
_CALL_TIMEOUT_S = 60.0
_STOPPED_S = 30.0
_LOOK_S = 1.0
_FDS_AT_ONCE = 100
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Spawner:
    """Requests are posted at once and answered later, so that imports overlap with other work."""

    def __init__(
        self,
        target: str,
        *,
        scratch: Sequence[str],
        log: str,
        warm: Sequence[str] = (),
        preparation: bytes = b"",
    ) -> None:
        """Start the zygote; do not wait for it. `log` takes its stdout and stderr, `warm` are
        modules that it imports too, `preparation` is for the target's `prepare`.

        Raises OSError when no process can be started.
        """
        self._log = log
        self._tickets = itertools.count(1)
        self._answers: dict[int, Spawned | NotSpawned | Reaped] = {}
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._ready: Ready | None = None
        self._why_dead = ""
        self._control, far = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        with far, open(log, "ab") as output:
            self._process = subprocess.Popen(
                # The parent's directory comes first on the path of -m, so it is / until Hello.
                [sys.executable, "-m", "zerocheck.ranks.zygote", str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=_environment(path),
                start_new_session=True,
            )
        self._post(
            Hello(
                parent_pid=os.getpid(),
                target=target,
                sys_path=path,
                python_path=os.environ.get("PYTHONPATH"),
                directory=os.getcwd(),
                scratch=list(scratch),
                warm=list(warm),
                preparation=preparation,
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._why_dead and self._process.poll() is None

    def wait_until_ready(self) -> float:
        """Seconds that the imports took. Raises HarnessError when they failed."""
        while self._ready is None:
            self._read(START_TIMEOUT_S)
        return self._ready.seconds

    def spawn(
        self,
        far_ends: Sequence[socket.socket],
        *,
        directory: str,
        board: str,
        arena_directories: Sequence[str],
        hosts: tuple[int, ...] = (),
        device: str = CPU,
        backend: str | None = None,
    ) -> int:
        """Ask for a rank at each socket. Returns the ticket for `spawned`."""
        ticket = next(self._tickets)
        size = len(far_ends)
        arenas = list(arena_directories)
        self._post(Spawn(ticket, size, hosts, directory, board, arenas, device, backend))
        descriptors = [sock.fileno() for sock in far_ends]
        for start in range(0, len(descriptors), _FDS_AT_ONCE):
            try:
                socket.send_fds(self._control, [b"F"], descriptors[start : start + _FDS_AT_ONCE])
            except OSError as error:
                self._give_up(f"lost contact ({error})")
        return ticket

    def spawned(self, ticket: int) -> list[int]:
        """The pids, in rank order. Waits for the fork.

        Raises OSError if a rank could not be forked, each time that it is called, and HarnessError.
        """
        answer = self._answer(ticket)
        if isinstance(answer, NotSpawned):
            self._answers[ticket] = answer
            raise OSError(answer.number, f"a rank could not be started: {answer.text}")
        assert isinstance(answer, Spawned)
        return answer.pids

    def reap(self, pids: Sequence[int], *, patience_s: float) -> list[Exit]:
        """Kill what lives after `patience_s`, wait for all. Raises HarnessError."""
        ticket = next(self._tickets)
        self._post(Reap(ticket, list(pids), patience_s))
        answer = self._answer(ticket)
        assert isinstance(answer, Reaped)
        return answer.exits

    def close(self) -> None:
        """The zygote kills its ranks at end of file, then exits. One that still imports has no
        ranks and does not look: it is killed, with what its imports started."""
        self._why_dead = self._why_dead or "it was closed"
        importing = self._ready is None and not _readable(self._control)
        self._control.close()
        if importing:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks die with it
            self._process.wait()

    def _post(self, request: Request) -> None:
        if self._why_dead:
            raise HarnessError(f"the process that starts ranks is gone: {self._why_dead}")
        try:
            self._control.sendall(frame(request))
        except OSError:
            # It may have reported the reason before it ended.
            while True:
                self._read(_CALL_TIMEOUT_S)

    def _answer(self, ticket: int) -> Spawned | NotSpawned | Reaped:
        while ticket not in self._answers:
            self._read(_CALL_TIMEOUT_S if self._ready else START_TIMEOUT_S)
        return self._answers.pop(ticket)

    def _read(self, timeout_s: float) -> None:
        """Take one answer. Raises HarnessError when there is none any more."""
        if self._why_dead:
            raise HarnessError(f"the process that starts ranks is gone: {self._why_dead}")
        self._await(timeout_s)
        self._control.settimeout(timeout_s)
        try:
            answer = receive(self._control, self._decoder)
        except TimeoutError:
            self._give_up(f"no answer for {timeout_s:g} s")
        except (EOFError, OSError) as error:
            self._give_up(f"{error}{self._exit_text()}")
        finally:
            self._control.settimeout(None)
        if isinstance(answer, Failed):
            self._give_up(f"its imports failed\n{answer.text}")
        if isinstance(answer, Ready):
            self._ready = answer
        elif isinstance(answer, (Spawned, NotSpawned, Reaped)):
            self._answers[answer.ticket] = answer

    def _await(self, timeout_s: float) -> None:
        """Wait until there is something to read. Time counts only while the zygote does nothing:
        on a loaded machine it may wait minutes for a processor, or for the disk."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        idle_s, progress = 0.0, None
        while not poll.poll(_LOOK_S * 1000):
            signals.check()
            now = activity(self.pid, alone=True)
            # Where nothing else is known, time decides.
            moved = now is not None and not (now.asleep and now == progress)
            idle_s = 0.0 if moved else idle_s + _LOOK_S
            progress = now
            stopped = now is not None and now.stopped
            if idle_s >= (min(timeout_s, _STOPPED_S) if stopped else timeout_s):
                self._give_up(f"no answer for {idle_s:g} s, in which it did nothing")

    def _give_up(self, why: str) -> None:
        self._why_dead = why
        raise HarnessError(f"the process that starts ranks is gone: {why}{self._tail()}")

    def _exit_text(self) -> str:
        deadline = time.monotonic() + 1.0
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return "" if code is None else f", exit code {code}"

    def _tail(self) -> str:
        try:
            with open(self._log, "rb") as log:
                text = log.read()[-4000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f"\nit wrote:\n{text}" if text else ""


def _readable(control: socket.socket) -> bool:
    poll = select.poll()  # select() knows no descriptor over 1,023
    poll.register(control, select.POLLIN)
    return bool(poll.poll(0))


def _environment(path: Sequence[str]) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path)
    for name in _ONE_THREAD:
        environment[name] = "1"
    prefer_huge_pages(environment)
    # The same order of sets in every rank and in every run.
    environment.setdefault("PYTHONHASHSEED", "0")
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        # Never a look-up of the host's name, and never a socket that others can reach.
        environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return environment


def shut_down(spawner: Spawner, scratch: Scratch, cores: Cores, owner: int) -> None:
    """End the zygote, and return what its pool took. Does nothing in a fork of the owner."""
    if os.getpid() != owner:
        return
    spawner.close()
    scratch.remove()
    cores.release()
