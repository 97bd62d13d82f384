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


def parse_rate(text: str) -> float:
    """Parse the speed of a link, such as `400GB/s`, `50 GiB/s` or `400Gbit/s`, in bytes per second.

    A capital B is a byte, and a small b a bit, as on data sheets. Raises UsageError for anything
    else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\S*)\s*", text)
    if found is not None and not found[2]:
        raise UsageError(
            f"{text!r} has no unit; did you mean '{found[1]} GB/s'? (or '{found[1]} Gbit/s', ...)"
        )
    unit = None if found is None else re.fullmatch(r"([KMGTkmgt]i?)?(B|b|bit)(/s|ps)", found[2])
    rate = 0.0
    if found is not None and unit is not None:
        prefix = (unit[1] or "").capitalize()
        factor = _UNITS[f"{prefix}B"]
        rate = float(found[1]) * factor / (1 if unit[2] == "B" else 8)
    if not rate:
        raise UsageError(
            f"{text!r} is not the speed of a link; give one such as 400GB/s, 50GiB/s or 400Gbit/s"
        )
    return rate


_OPERATIONS = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def parse_operations(text: str) -> float:
    """Parse floating-point operations per second, such as `400T`, `1.2P` or `989 TFLOPS`.

    Raises UsageError for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z/]*)\s*", text, re.IGNORECASE)
    if found is not None and not found[2]:
        raise UsageError(f"{text!r} has no unit; did you mean '{found[1]}T'? (or G, P)")
    unit = re.fullmatch(r"([MGTP])(FLOPS?|FLOP/S)?", found[2].upper()) if found else None
    speed = float(found[1]) * _OPERATIONS[unit[1]] if found and unit else 0.0
    if not speed:
        raise UsageError(
            f"{text!r} is not a number of operations per second; give one such as 400T or 1.2P"
        )
    return speed


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
