"""Mechanism of making a choice, from any source; `choices.py` lists the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from .schema import Block, Case

T = TypeVar("T")
Choose = Callable[[int], int]
"""choose(n) -> an index below n; smaller is simpler."""

Part = Callable[[Callable[[], T]], T]
"""part(make) -> make(), where the choices in it may be told to belong together."""


class Picker:
    """Maker of choices in order; a fixed field is not chosen."""

    def __init__(
        self,
        choose: Choose,
        part: Part[Block | None],
        fixed: Mapping[str, Any],
        worlds: Sequence[tuple[int, ...]],
    ) -> None:
        self._choose = choose
        self._part = part
        self._fixed = fixed
        self._worlds = worlds
        self._user = fixed.get("model.user")  # nothing of it is drawn, nor its batches

    def pick(self, options: Sequence[T]) -> T:
        """Choose one of the options; the first is the simplest."""
        return options[self._choose(len(options))] if len(options) > 1 else options[0]

    def chance(self, percent: int) -> bool:
        """Return True in `percent` of 100; False is simpler."""
        return self._choose(100) >= 100 - percent

    def field(self, path: str, chosen: Callable[[], T]) -> T:
        """Return the fixed value of the field, or the result of `chosen`."""
        return cast("T", self._fixed[path]) if path in self._fixed else chosen()

    def flag(self, path: str, percent: int) -> bool:
        """Choose a boolean field that is True in `percent` of 100."""
        return self.field(path, lambda: self.chance(percent))

    def option(self, path: str, options: Sequence[T]) -> T:
        """Choose a field with one of the options."""
        return self.field(path, lambda: self.pick(options))


def section(name: str, fixed: Mapping[str, Any]) -> Any:
    """Return a section that is not drawn: its defaults, with the fixed fields in it."""
    prefix = f"{name}."
    given = {
        path.removeprefix(prefix): value for path, value in fixed.items() if path.startswith(prefix)
    }
    return msgspec.structs.replace(getattr(Case(), name), **given)
