"""Global settings with a getter and a setter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .places import StateChange


@dataclass(frozen=True)
class GlobalSetting:
    """One global setting of a process.

    name: in words; put: None where it cannot be undone; quantity: it counts what was left; follows:
    it is reported only where nothing else was, since others change it too; lasting: as of Change.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object] | None = None
    quantity: bool = False
    follows: bool = False
    lasting: bool = False

    def words(self, before: Any, after: Any) -> str:
        """Format a change: `"grad mode off"`, `"1 autocast contexts entered"`."""
        if self.quantity:
            return f"{after - before if after > before else after} {self.name}"
        if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
            changed = [new for old, new in zip(before, after, strict=True) if old != new]
            after = changed[0] if changed and isinstance(changed[0], bool) else after
        if isinstance(after, bool):
            return f"{self.name} {'on' if after else 'off'}"
        plain = isinstance(after, int | float | str | torch.dtype | torch.device)
        return f"{self.name} {after}" if plain and len(str(after)) < 60 else f"{self.name} changed"


class Settings:
    """Place of settings, in the order in which they are undone."""

    def __init__(self, settings: Iterable[GlobalSetting]) -> None:
        """Take the current values as clean."""
        self._settings = tuple(settings)
        self._gets = tuple(one.get for one in self._settings)
        self._clean = self._values()

    def changes(self) -> Iterator[StateChange]:
        values = self._values()
        if values == self._clean:
            return
        found = False
        for number, (setting, before) in enumerate(zip(self._settings, self._clean, strict=True)):
            after = _value(setting.get)  # what was undone meanwhile may have been of this too
            if after == before or (setting.follows and found):
                continue
            found = True
            words = setting.words(before, after)
            exact = setting.put is not None
            yield StateChange(self, number, before, after, words, exact, lasting=setting.lasting)

    def put(self, key: int, value: Any) -> None:
        setting = self._settings[key]
        assert setting.put is not None
        setting.put(value)
        if _value(setting.get) != value:
            raise RuntimeError(f"{setting.name} cannot be set")

    def adopt(self, change: StateChange) -> None:
        self._clean[change.key] = change.after

    def _values(self) -> list[Any]:
        return [_value(get) for get in self._gets]


def _value(get: Callable[[], Any]) -> Any:
    """Return a setting's value; torch raises for some where newer switches were used."""
    try:
        return get()
    except Exception as error:
        return type(error)
