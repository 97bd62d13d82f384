"""Places of global state: their common interface, and one change of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Missing:
    """Marker for a value that is absent."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class StateChange(NamedTuple):
    """Difference from the clean state. Undone by `place.put(key, before)`, if it is `exact`.

    words: follow "left"; lasting: where importing code changed it, it stays, since code is imported
    once.
    """

    place: StateKind
    key: Any
    before: Any
    after: Any
    words: str
    exact: bool = True
    lasting: bool = False


class StateKind(Protocol):
    """Global state of one kind, with its clean values."""

    def changes(self) -> Iterator[StateChange]:
        """Iterate over all differences from the clean state."""

    def put(self, key: Any, value: Any) -> None:
        """Set one value. Raises the errors of setting it."""

    def adopt(self, change: StateChange) -> None:
        """Take the current value as clean."""
