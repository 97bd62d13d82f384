"""Options that only some implementations have: those that adapters declare, and torch's offloading.

They are drawn by the seed of the case and not by choices of their own, so that all other choices
stay what they are; and not at all for an implementation that does not name them in its `options`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import inspect

from ..catalogue import option_sets
from .option_set import OptionSet, OptionValue, OptionValues

OFFLOAD: tuple[OptionValue, ...] = ("none",) * 8 + ("pageable", "pageable", "pinned")
"""Values of `sharding.offload`, the default first."""


@cache
def defaults() -> Mapping[str, OptionValue]:
    """Return the options of all adapters, by their name in `case.options`, with their defaults."""
    return {name: value for one in _sets() for name, value in one.defaults()}


@cache
def drawn_values() -> Mapping[str, tuple[OptionValue, ...]]:
    """Return the values that seeds draw, by the name that an implementation's `options` has.

    A name without a dot is a field of `case.sharding`.
    """
    drawn = {one.named(name): values for one in _sets() for name, values in one.drawn.items()}
    return {**drawn, "offload": OFFLOAD}


def drawn(seed: int) -> dict[str, OptionValue]:
    """Draw the options of a case with this seed."""
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    return {
        name: values[int(source.random() * len(values))] for name, values in drawn_values().items()
    }


def plain(obeyed: Collection[str] | None) -> dict[str, dict[str, Any]]:
    """Return the defaults of the options that are not obeyed, as nested fields of a case.

    None: obeyed options unknown.
    """
    fields: dict[str, dict[str, Any]] = {}
    for name, values in drawn_values().items():
        if name not in (obeyed or ()):
            section, option = placed(name)
            fields.setdefault(section, {})[option] = values[0]
    return fields


def placed(name: str) -> tuple[str, str]:
    """Return the section of a case, and the name in it, of an option."""
    return ("options" if name in defaults() else "sharding"), name


def stored(given: Mapping[str, OptionValue]) -> OptionValues:
    """Return options as a case stores them: sorted, without those at their default."""
    usual = defaults() if given else {}
    kept = {name: v for name, v in given.items() if name not in usual or _differs(v, usual[name])}
    return OptionValues(sorted(kept.items()))


def _differs(value: OptionValue, default: OptionValue) -> bool:
    return type(value) is not type(default) or value != default


def types() -> Iterator[tuple[str, inspect.Type]]:
    """Iterate over the options of all adapters, with msgspec's description of their types."""
    for one in _sets():
        for field in _described(one.kind).fields:
            yield one.named(field.encode_name), field.type


@cache
def _described(kind: type) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(kind))


def accepts(name: str, value: Any) -> bool:
    """Return True if the value is one of the option's."""
    for one in _sets():
        if name.startswith(f"{one.prefix}."):
            try:
                msgspec.convert({name.removeprefix(f"{one.prefix}."): value}, one.kind)
            except msgspec.ValidationError:
                return False
    return True


def _sets() -> tuple[OptionSet, ...]:
    return option_sets()
