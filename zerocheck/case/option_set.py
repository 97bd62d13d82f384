"""Options that one adapter declares in its `options.py`: their values, draws and features.

A case carries them as data: `case.options` maps `ADAPTER.OPTION` to what is not at its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

OptionValue = bool | int | str


class OptionFeature(NamedTuple):
    """Feature of cases that have an option at certain values: present(values of the adapter).

    In the dimension "resume" only cases with checkpoints have it.
    """

    name: str
    title: str
    dimension: Literal["sharding", "resume"]
    option: str
    present: Callable[[Any], bool]


@dataclass(frozen=True, eq=False)
class OptionSet:
    """Options of one adapter.

    kind: a struct with a default and bounds for each; drawn: option -> the values that seeds draw,
    the default first, one that stands twice twice as often.
    """

    prefix: str
    kind: type[msgspec.Struct]
    drawn: Mapping[str, tuple[OptionValue, ...]]
    features: tuple[OptionFeature, ...]

    def named(self, option: str) -> str:
        """Return the name in `case.options`."""
        return f"{self.prefix}.{option}"

    def defaults(self) -> Iterator[tuple[str, OptionValue]]:
        """Iterate over the names in `case.options`, with the defaults."""
        plain = self.kind()
        for option in self.kind.__struct_fields__:
            yield self.named(option), getattr(plain, option)

    def values(self, options: Mapping[str, OptionValue]) -> Any:
        """Return the adapter's options of a case as its struct, defaults included.

        Raises msgspec.ValidationError for a value out of bounds.
        """
        return _values(self, options)


@lru_cache(maxsize=4096)
def _values(given: OptionSet, options: Mapping[str, OptionValue]) -> Any:
    start = f"{given.prefix}."
    values = {name.removeprefix(start): v for name, v in options.items() if name.startswith(start)}
    return msgspec.convert(values, given.kind)


class OptionValues(dict[str, OptionValue]):
    """Options of a case that are not at their default, by name and in its order. Hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))
