"""Dates of files, which show where one of them may come from another save."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_INDEX = ".metadata"
_MARGIN_S = 60.0
"""Clocks of hosts, and copying a directory file by file, differ by less."""


def dates(directory: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield notes on files that were changed long after the index, which a save writes last.

    No finding: a copy has dates of its own.
    """
    try:
        index = (directory / _INDEX).stat().st_mtime
    except OSError:
        return
    for name in sorted(names):
        try:
            changed = (directory / name).stat().st_mtime
        except (OSError, ValueError):
            continue
        if changed > index + _MARGIN_S:
            yield (
                f"{name} was changed at {_date(changed)}, after the index ({_date(index)}), which "
                "a save writes last: it was copied here later, or is of another save"
            )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
