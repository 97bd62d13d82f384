"""Checks of arguments: each ValueError says what was given and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'weight'?"` for the nearest allowed word, or an empty string."""
    found = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def one_of(what: str, given: object, allowed: Iterable[str]) -> None:
    """Refuse `given` unless it is one of the words `allowed`."""
    words = list(allowed)
    if given not in words:
        hint = nearest(given, words) if isinstance(given, str) else ""
        raise ValueError(f"{what} is {given!r}{hint} (allowed: {', '.join(map(repr, words))})")


def real(
    what: str,
    given: object,
    *,
    low: float = 0.0,
    low_open: bool = False,
    high: float = math.inf,
    high_open: bool = True,
) -> None:
    """Refuse `given` unless it is an int or float between `low` and `high`; NaN is refused.

    An end belongs to the range unless it is open. By default the range is [0, inf).
    """
    fits = isinstance(given, (int, float)) and not isinstance(given, bool)
    if fits:
        assert isinstance(given, (int, float))
        fits = (low < given if low_open else low <= given) and (
            given < high if high_open else given <= high
        )
    if not fits:
        span = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise ValueError(f"{what} is {given!r} (allowed: a real number in {span})")


def whole(what: str, given: object, *, low: int = 0) -> None:
    """Refuse `given` unless it is an int of at least `low`."""
    if not isinstance(given, int) or isinstance(given, bool) or given < low:
        raise ValueError(f"{what} is {given!r} (allowed: an int of at least {low})")


def flag(what: str, given: object) -> None:
    """Refuse `given` unless it is a bool."""
    if not isinstance(given, bool):
        raise ValueError(f"{what} is {given!r} (allowed: True or False)")
