"""Environment of a run, for the journal and for replay."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...catalogue import OF_EXTRAS, extra_of
from ...machine.devices import CPU, kind_of, placed, processor
from ...version import __version__
from ..known_issues.entries import ours
from ..records.records import Environment

TESTED = ("2.13.0",)
"""torch versions that the whole test suite runs."""


def untested_versions() -> str:
    """Return a warning for a torch in which nothing was measured; empty for any other.

    It says what to expect there.
    """
    this = torch.__version__.split("+")[0]
    measured = ours()[0].versions.measured["torch"]
    if this in (*TESTED, *measured):
        return ""
    return (
        f"zerocheck was not run with torch {this}, but with {', '.join(measured)}: a fault that is "
        "new in it is a finding, and a known issue that is gone there fails nothing"
    )


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
