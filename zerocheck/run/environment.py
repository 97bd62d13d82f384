"""Where a run takes place, for the journal and for replay."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from .. import __version__
from .records import Environment

TESTED = ("2.13.0",)
"""torch versions that the test suite runs."""


def untested() -> str:
    """One line of warning for a torch that the tests do not run; empty for one that they do."""
    version = torch.__version__.split("+")[0]
    if version in TESTED:
        return ""
    return f"zerocheck is tested with torch {', '.join(TESTED)}; this is {version}"


def environment() -> Environment:
    """Versions, processor and cores of this machine."""
    return Environment(
        zerocheck=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_processor(),
        cores=os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
