"""Figures of the last run of each benchmark, in figures.md: nobody copies them by hand."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

PATH = Path(__file__).with_name("figures.md")
HEAD = """# Figures of the benchmarks

Written by `tox -e bench`: each benchmark replaces its own section. What they measure, and against
what: [README](README.md).
"""


def keep(name: str, texts: Sequence[str], path: Path = PATH) -> None:
    """Put what a benchmark shows into its section. name: of the test function."""
    sections = read(path)
    text = "\n\n".join(one.strip("\n") for one in texts)
    sections[name] = f"{conditions()}\n\n```text\n{text}\n```\n"
    body = "".join(f"\n## {key}\n\n{sections[key]}" for key in sorted(sections))
    path.write_text(HEAD + body)


def read(path: Path) -> dict[str, str]:
    """Return the sections of the file by their names."""
    if not path.exists():
        return {}
    parts = path.read_text().split("\n## ")[1:]
    split = (part.partition("\n\n") for part in parts)
    return {name: body for name, _, body in split}


def conditions() -> str:
    """Return where and when: date, processor, cores, load and versions."""
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({_processor()}), load average "
        f"{load:.1f} at its end, torch {torch.__version__}, Python {platform.python_version()}."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
