"""Keys of one object, sorted by the table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....errors import UsageError
from .keys import Key
from .section import AUTO, Section
from .text import shown


class TreatedKeys(NamedTuple):
    """Keys of a section by their treatment.

    passed: keys and values for the engine; left_out: keys that a note mentions, and why; auto: keys
    that are left to be filled in.
    """

    passed: dict[str, Any]
    left_out: dict[str, str]


def treat_keys(given: Section, table: Mapping[str, Key], effect: str) -> TreatedKeys:
    """Sort the keys of a section into those passed on and those left out.

    effect: what DeepSpeed does with a key that it does not know. Raises UsageError for such a key,
    and for one that is refused.
    """
    given.check_names(table, effect)
    passed: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in given.values.items():
        key = table.get(name)
        if key is None or value is None:
            continue
        if key.kind == "removed":
            raise UsageError(f"{given.source}: {given.prefix}{name}: {key.why}; leave it out")
        if value == AUTO:
            continue
        if key.kind == "refused":
            _check(given, name, key)
        elif key.kind == "passed":
            passed[name] = value
        elif key.why:
            left_out[f"{given.prefix}{name}"] = key.why
    return TreatedKeys(passed, left_out)


def _check(given: Section, name: str, key: Key) -> None:
    """Raise UsageError for another value than those that a refused key may have."""
    value = given.values[name]
    if key.off:
        inside = given.part(name)
        switch = inside.values.get(key.off, False)
        if switch in (False, 0, 1) and switch is not True:
            return
        number = isinstance(switch, int) and not isinstance(switch, bool)
        raise inside.refuse(key.off, key.why, "1, left out" if number else "false, left out")
    if any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in key.allowed
    ):
        return
    allowed = ", ".join([*map(shown, key.allowed), "left out"])
    raise given.refuse(name, key.why, allowed)
