"""Keys of one object, sorted by the table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ....errors import UsageError
from .section import AUTO, IGNORED, Section
from .text import shown


class Key(NamedTuple):
    """Treatment of a key of a library's config.

    said: a field of cases holds it, or what the implementation declares; size: in elements, taken
    where it is small, else drawn; passed: the library is given it as it stands, and every
    obligation must hold all the same; left out: nothing that is checked depends on it, or a case
    decides it; refused: with any other value than those allowed; removed: the library itself
    refuses a config with it.

    why: a key is left out or refused; allowed: values that a refused key may have; off: a refused
    key that is an object may have this switch at false, such as `enabled`.
    """

    kind: Literal["said", "size", "passed", "left out", "refused", "removed"]
    why: str = ""
    allowed: tuple[Any, ...] = ()
    off: str = ""


SAID = Key("said")
SIZE = Key("size")
PASSED = Key("passed")
SILENT = Key("left out")
"""Treatment of keys that only print, log or profile, or do nothing without what is refused."""


def switched_off(why: str, switch: str = "enabled") -> Key:
    """Return the treatment of an object that is refused unless its switch is false."""
    return Key("refused", why, off=switch)


def only(why: str, *allowed: Any) -> Key:
    """Return the treatment of a key that is refused with another value than these."""
    return Key("refused", why, allowed)


class TreatedKeys(NamedTuple):
    """Keys of a section by their treatment.

    passed: keys and values for the engine; left_out: keys that a note mentions, and why; auto: keys
    that are left to be filled in.
    """

    passed: dict[str, Any]
    left_out: dict[str, str]


def left_out_notes(source: str, left_out: Mapping[str, str]) -> list[str]:
    """Return a note for each reason why keys are left out. source: the file."""
    by_reason: dict[str, list[str]] = {}
    for key, why in left_out.items():
        by_reason.setdefault(why, []).append(key)
    return [f"{source}: left out: {', '.join(keys)}: {why}" for why, keys in by_reason.items()]


def treat_keys(given: Section, table: Mapping[str, Key], effect: str = IGNORED) -> TreatedKeys:
    """Sort the keys of a section into those passed on and those left out.

    effect: what the library does with a key that it does not know. If it is to ignore the key,
    the key is left out. Raises UsageError for one that the library refuses, for a misspelling, and
    for a key that zerocheck refuses.
    """
    passed: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    if effect == IGNORED:
        ignored = given.ignored_names(table)
        left_out = {f"{given.prefix}{name}": why for name, why in ignored.items()}
    else:
        given.check_names(table, effect)
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
