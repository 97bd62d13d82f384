"""Reading of a user's config, once while its file does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ....errors import file_of
from .section import Section
from .text import plain

Config = TypeVar("Config")


class Reader(Generic[Config]):
    """Reader of the configs of a library. sort: makes of the whole object what a check needs."""

    def __init__(self, library: str, sort: Callable[[Section], Config]) -> None:
        self._library = library
        self._sort = sort
        self._known: dict[tuple[str, Path], tuple[tuple[int, int], Config]] = {}

    def read(self, name: str) -> Config:
        """Read the config in a file. Raises UsageError for a file that cannot be read or sorted."""
        path = file_of(name)
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._known.get((name, path))
        if known is None or known[0] != stamp:
            made = self._sort(Section(self._library, name, "", plain(name, self._library)))
            known = self._known[name, path] = (stamp, made)
        return known[1]


_values: Reader[Mapping[str, Any]] = Reader("trainer", lambda top: top.values)


def values_of(name: str) -> Mapping[str, Any]:
    """Return the object in a file, of whatever library. Raises UsageError as `Reader.read`."""
    return _values.read(name)
