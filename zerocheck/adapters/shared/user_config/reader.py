"""Reading of a user's config, once while its file does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ....errors import UsageError, file_of
from .section import Section
from .text import plain


class HasCode(Protocol):
    """Config of which a built-in implementation is the same code."""

    @property
    def code(self) -> str:
        """Name of it: its known issues apply."""


Config = TypeVar("Config", bound=HasCode)


class Reader(Generic[Config]):
    """Reader of the configs of a library. sort: makes of the whole object what a check needs."""

    def __init__(self, library: str, sort: Callable[[Section], Config]) -> None:
        self._library = library
        self._sort = sort
        self._known: dict[tuple[str, Path], tuple[tuple[int, int], Config]] = {}

    def read(self, name: str) -> Config:
        """Read the config in a file, once while it does not change.

        Raises UsageError, with file, key, what is given, what is allowed and why, for what is no
        config, for a key that the library does not know, for what it refuses, and for what
        zerocheck does not check.
        """
        path = file_of(name)
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._known.get((name, path))
        if known is None or known[0] != stamp:
            made = self._sort(Section(self._library, name, "", plain(name, self._library)))
            known = self._known[name, path] = (stamp, made)
        return known[1]

    def code_of(self, name: str) -> str | None:
        """Return the built-in implementation of the same code; None if the file is invalid."""
        try:
            return self.read(name).code
        except UsageError:
            return None


def values_of(name: str) -> Mapping[str, Any]:
    """Return the object in a file, of whatever library. Raises UsageError as `Reader.read`."""
    return Section("trainer", name, "", plain(name, "trainer")).values
