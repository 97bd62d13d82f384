"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from .errors import UsageError

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def parse_size(text: str) -> int:
    """Parse a size such as `80GiB` (1024), `80GB` (1000), `512 MiB` or `1000 B`, in any case.

    Raises UsageError for anything else, and for less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    units = {unit.casefold(): size for unit, size in _UNITS.items()}
    unit = found[2].casefold() if found else None
    if found is not None and not unit:
        raise UsageError(
            f"{text!r} has no unit; did you mean '{found[1]} GiB'? (or B, MiB, GB, ...)"
        )
    if found is None or unit not in units:
        raise UsageError(f"{text!r} is not a size; give one such as 80GiB, 40GB, 512MiB or 1000B")
    size = int(float(found[1]) * units[unit])
    if size < 1:
        raise UsageError(f"{text!r} is less than one byte")
    return size


def binary(size: float) -> str:
    """Format bytes with three decimals of the largest unit of 1024 that fits: `1.027 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3f} {unit}"
        value /= 1024
    return f"{value:.3f} PiB"


def decimal(size: float) -> str:
    """Format bytes with three digits of the largest unit of 1000, as links are sold: `12.3 GB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"
