"""Bytes as people write and read them. Imports no torch."""

from __future__ import annotations

import re

from ..errors import UsageError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def parse(text: str) -> int:
    """Bytes of `80GiB` (1024), `80GB` (1000), `512 MiB` or `1000`; upper and lower case.

    Raises UsageError for anything else, and for less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    units = {unit.casefold(): size for unit, size in _UNITS.items()}
    unit = found[2].casefold() if found else None
    if found is None or unit not in units:
        raise UsageError(f"{text!r} is no size; give one such as 80GiB, 40GB, 512MiB or 1000000")
    size = int(float(found[1]) * units[unit])
    if size < 1:
        raise UsageError(f"{text!r} is less than one byte")
    return size


def binary(size: float) -> str:
    """`1.027 GiB`: three decimals of the largest unit of 1024 that fits."""
    return _written(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def decimal(size: float) -> str:
    """`31.4 GB`, as papers count: four digits of the largest unit of 1000 that fits."""
    value, unit = _scaled(size, 1000, ("B", "KB", "MB", "GB", "TB", "PB"))
    return f"{value:.4g} {unit}" if abs(value) < 9999.5 else f"{value:.0f} {unit}"


def _written(size: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = _scaled(size, base, units)
    return f"{value:.0f} {unit}" if unit == units[0] else f"{value:.3f} {unit}"


def _scaled(size: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    value = float(size)
    for unit in units[:-1]:
        if abs(value) < base:
            return value, unit
        value /= base
    return value, units[-1]
