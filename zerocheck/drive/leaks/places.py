"""Places where global state is: what each must do, and one change of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Change(NamedTuple):
    """One thing that is other than before. Put back by `place.put(key, before)`, if it is `exact`.

    words: follow "left"; silent: undone without a word; lasting: where importing code changed it,
    it stays, since code is imported once.
    """

    place: Place
    key: Any
    before: Any
    after: Any
    words: str
    exact: bool = True
    silent: bool = False
    lasting: bool = False


class Place(Protocol):
    """Global state of one kind, with the clean values in mind."""

    def changes(self) -> Iterator[Change]:
        """Everything that differs from the clean state now."""

    def put(self, key: Any, value: Any) -> None:
        """Set one thing. Raises whatever that raises."""

    def adopt(self, change: Change) -> None:
        """Take what is there now for clean."""
