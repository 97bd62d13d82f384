"""Environment of a run, for the journal and for replay."""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from ..catalogue import OF_EXTRAS, extra_of
from ..devices import CPU, kind_of, placed, processor
from ..errors import UsageError
from .records import Environment

DESCRIPTORS, DESCRIPTORS_PER_RANK = 32, 4
"""Files and sockets that a process of a run has open at once, at most. The parent and a rank of 2
had 15 each; user code opens some too."""
TESTED = ("2.13.0",)
"""torch versions that the test suite runs."""


def untested() -> str:
    """Return a warning for a torch that zerocheck is not tested with; empty for a tested one."""
    this = torch.__version__.split("+")[0]
    if this in TESTED:
        return ""
    return f"zerocheck is tested with torch {', '.join(TESTED)}; this is {this}"


def environment(device: str = CPU) -> Environment:
    """Return versions, processor and cores of this machine, and the GPU if cases run on one."""
    kind = kind_of(device)
    gpu = cuda = ""
    if kind != CPU:
        gpu = processor(placed(kind) if device == kind else torch.device(device))
        cuda = f"CUDA {torch.version.cuda}, cuDNN {_cudnn()}"
    return Environment(
        zerocheck=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_processor(),
        cores=os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        device=kind,
        gpu=gpu,
        cuda=cuda,
        libraries=_libraries(),
    )


def check_machine(world_size: int) -> None:
    """Raise UsageError, with what to do, where ranks cannot be started or cannot meet here."""
    _check_names()
    _check_loopback()
    _check_descriptors(DESCRIPTORS + DESCRIPTORS_PER_RANK * world_size)


def _check_names() -> None:
    for name in (os.getcwd(), tempfile.gettempdir(), *sys.path):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{name!a} is a directory whose name is not UTF-8, and messages to ranks are; run "
                "this elsewhere"
            ) from error


def _check_loopback() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise UsageError(
            f"ranks meet on 127.0.0.1, which cannot be reached ({error.strerror}); bring the "
            "loopback interface up: ip link set lo up"
        ) from error


def _check_descriptors(needed: int) -> None:
    """Raise this process's limit of descriptors, if it is too low and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{hard} files may be open at once, and ranks need {needed}; allow more (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _libraries() -> str:
    found = []
    for extra in dict.fromkeys(extra_of(name) for name in OF_EXTRAS):
        with suppress(PackageNotFoundError):
            found.append(f"{extra} {version(extra)}")
    return ", ".join(found)


def _cudnn() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
