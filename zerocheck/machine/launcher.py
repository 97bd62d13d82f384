"""The launcher's environment (torchrun), and the report of the exit code to it.

torchrun ends all processes of a host with SIGTERM as soon as one of them leaves with an error, and
prints a table of those that did. So all ranks leave together, with one exit code, and the table
holds the outcome.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from zerocheck.errors import RanksLost, UsageError
from zerocheck.machine import signals

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SEE_RANK_0 = "rank 0 says why"
_SIOCGIFADDR = 0x8915
_SILENT_S = 10.0


def has_launcher() -> bool:
    """Return True if a launcher started this process as one of several."""
    return all(name in os.environ for name in NEEDED)


def is_rank_0() -> bool:
    """Return True if this process reports for all ranks; also where there is no launcher."""
    return not has_launcher() or os.environ["RANK"] == "0"


def check_environment() -> None:
    """Raise UsageError outside of torchrun."""
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start this with `torchrun --nproc-per-node N ...`,"
            " or use --ranks processes"
        )


class Wait:
    """Wait for other ranks of the launcher, which says after a while what it waits for.

    Variables of another job that is over look like those of a launcher.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._said = False

    @staticmethod
    def words() -> str:
        """Where the other ranks should be, who says so, and what to do if there are none."""
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in NEEDED[:2])
        at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        return (
            f"not all ranks of the launcher have come to {at} ({given} and MASTER_ADDR are set). "
            f"If these variables are left over from another job: unset {' '.join(NEEDED)}"
        )

    def look(self) -> None:
        """Say it on stderr, once, when the wait is long. Raises the error of a signal."""
        signals.check()
        if not self._said and time.monotonic() - self._since > _SILENT_S:
            self._said = True
            sys.stderr.write(ascii(f"waiting: {self.words()}")[1:-1] + "\n")
            sys.stderr.flush()


def host_number() -> str:
    """Return an id of this host, equal on its ranks: the launcher's number or the host's name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def choose_interface() -> None:
    """Let gloo use the interface that reaches the rendezvous, unless the user chose one.

    gloo looks its own host's name up, which is 127.0.1.1 on many machines, and then waits in vain.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):
        port = int(os.environ["MASTER_PORT"])
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], port, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            source = probe.getsockname()[0]
        alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                if _address(name) == source and (alone or not source.startswith("127.")):
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _lost() -> RanksLost:
    return RanksLost(
        "the launcher ended this run (SIGTERM), as it does when another rank dies or the job is "
        "cancelled"
    )


INTERRUPTS: Mapping[int, Callable[[], BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: _lost,
}
"""Signals that end the run on rank 0, and the errors that they raise: see machine/signals.py."""


def leave_at_once(code: int) -> None:
    """Let a signal of the launcher end this process with this exit code from here on."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def report_exit(code: int, text: str) -> None:
    """Write this rank's entry for the launcher's table of failures.

    The table calls the earliest the root cause, in whole seconds: rank 0 is never later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not code:
        return
    at = int(time.time()) + (text == SEE_RANK_0)
    message = {"py_callstack": text, "timestamp": str(at)}
    # In one move: the launcher may end this rank at any time, and fails on half an entry.
    with suppress(OSError):
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": message}}, file)
        os.replace(f"{path}.new", path)


def wait_for_rank_0(code: int, seconds: float) -> None:
    """Wait, so that rank 0 can report the error first: the launcher would end it before."""
    leave_at_once(code)
    time.sleep(seconds)
