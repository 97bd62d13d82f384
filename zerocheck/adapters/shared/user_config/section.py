"""Values of one object of a user's config, checked one by one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from ....errors import UsageError, did_you_mean
from .text import shown

IGNORED = "it would ignore it without a word"
"""What a library does with a key that it does not know."""

AUTO: Final = "auto"
"""Value that a tool around the library replaces by one of its own: nothing is said here."""


NEARLY = 0.85
"""Likeness of an unknown key to a known one from which on it is a misspelling."""


class Section(NamedTuple):
    """Object of a config.

    library: whose config it is, and source: the file, for messages; prefix: of its keys there.
    """

    library: str
    source: str
    prefix: str
    values: Mapping[str, Any]

    def part(self, key: str) -> Section:
        """Return the object under a key, empty if absent. UsageError for another value."""
        given = self.values.get(key)
        if given is None:
            given = {}
        if not isinstance(given, dict):
            raise self.wrong(key, "an object")
        return Section(self.library, self.source, f"{self.prefix}{key}.", given)

    def says(self, key: str) -> bool:
        """Return True if the key has a value, other than "auto" and null."""
        return key in self.values and self.values[key] not in (AUTO, None)

    def auto(self, *keys: str) -> bool:
        """Return True if any of the keys is "auto"."""
        return any(self.values.get(key) == AUTO for key in keys)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean value."""
        given = self._given(key, default)
        if not isinstance(given, bool):
            raise self.wrong(key, "true or false")
        return given

    def whole(self, key: str, default: int, lowest: int = 0) -> int:
        """Return an integer value; 5e8 is one."""
        given = self._given(key, default)
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int) or given < lowest:
            raise self.wrong(key, f"a whole number >= {lowest}")
        return given

    def number(
        self, key: str, default: float, *, lowest: float = 0.0, below: float = math.inf
    ) -> float:
        """Return a number from `lowest` on, and less than `below`."""
        given = self._given(key, default)
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not lowest <= given < below:
            end = "" if below == math.inf else f" and < {below:g}"
            raise self.wrong(key, f"a number >= {lowest:g}{end}")
        return float(given)

    def word(
        self,
        key: str,
        default: str | None,
        allowed: Collection[str],
        why: str = "",
        *,
        capitals: bool = False,
    ) -> Any:
        """Return one of some words, in any case. capitals: a message shows them in capitals."""
        given = self._given(key, default)
        if given is None:
            return None
        if not isinstance(given, str) or given.lower() not in allowed:
            spelled = [one.upper() if capitals else one for one in allowed]
            near = did_you_mean(given, spelled) if isinstance(given, str) else ""
            words = ", ".join(map(shown, spelled))
            raise self.wrong(key, words, near + (f": {why}" if why else ""))
        return given.lower()

    def check_names(self, known: Collection[str], effect: str) -> None:
        """Raise UsageError, with the nearest spelling, for an unknown key.

        Those that begin with an underscore, and `comment`, are notes of the author.
        effect: what the library does with an unknown one.
        """
        for name in self.values:
            if name not in known and not name.startswith("_") and name != "comment":
                whole = f"{self.prefix}{name}"
                raise UsageError(
                    f"{self.source}: {self.library} has no key {whole!r}"
                    f"{did_you_mean(name, known)} "
                    f"({effect})"
                )

    def ignored_names(self, known: Collection[str], effect: str = IGNORED) -> dict[str, str]:
        """Return the keys that the library does not know and ignores, each with that reason.

        Raises UsageError, with the nearest spelling, for a misspelling of a known key. effect: what
        the library does with it.
        """
        unknown: dict[str, str] = {}
        for name in self.values:
            if name in known or name.startswith("_") or name == "comment":
                continue
            if difflib.get_close_matches(name, known, n=1, cutoff=NEARLY):
                self.check_names((*known, *unknown), effect)
            unknown[name] = f"{self.library} ignores an unknown key{did_you_mean(name, known)}"
        return unknown

    def wrong(self, key: str, allowed: str, more: str = "") -> UsageError:
        """Return the error for a value that is not one of those allowed."""
        given = shown(self.values.get(key))
        return UsageError(f"{self.source}: {self.prefix}{key} is {given}{more}; allowed: {allowed}")

    def refuse(self, key: str, why: str, allowed: str) -> UsageError:
        """Return the error for a key that asks for something zerocheck cannot check."""
        given = shown(self.values.get(key))
        return UsageError(
            f"{self.source}: {self.prefix}{key} is {given}, which zerocheck does not check: {why} "
            f"(allowed: {allowed})"
        )

    def _given(self, key: str, default: Any) -> Any:
        return self.values[key] if self.says(key) else default
