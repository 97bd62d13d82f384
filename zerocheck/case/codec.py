"""Conversion of cases to JSON and plain data, and back, with helpful errors.

What comes from elsewhere is checked here for form: fields, types, bounds. Whether the fields go
together is said by `validity.check`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from ..errors import UsageError, did_you_mean
from .options import accepts, types
from .schema import FORMAT, Case

Path = tuple[str | int, ...]

_CASE_TYPE = inspect.type_info(Case)
_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


def encode(case: Case) -> bytes:
    """Encode the case as indented JSON, every field written out, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(case), indent=2) + b"\n"


def decode(data: bytes, *, source: str) -> Case:
    """Decode the case in `data`. `source` names the file in messages.

    Raises UsageError for what is not JSON, of another format version, or out of bounds.
    """
    return from_plain(parse(data, source=source), source=source)


def parse(data: bytes, *, source: str) -> Any:
    """Parse JSON into dicts, lists and numbers. Raises UsageError for invalid JSON."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"{source}: {_not_json(str(error), data)}") from None
    except UnicodeDecodeError as error:
        place = data.find(error.object[error.start : error.end])
        raise UsageError(f"{source} is not UTF-8 text ({_place(data, max(place, 0))})") from None
    except RecursionError:
        raise UsageError(f"{source} is nested too deeply to be a case") from None


def from_plain(raw: Any, *, source: str) -> Case:
    """Convert dicts, lists and numbers to a case. Raises UsageError, with the path in the case."""
    if not isinstance(raw, dict):
        raise UsageError(f"{source} is not a case: it holds {_shown(raw)}, needed is an object")
    version = raw.get("format", FORMAT)
    if isinstance(version, bool) or version != FORMAT:
        raise UsageError(
            f"{source} has case format {_shown(version)}; this zerocheck knows format {FORMAT}"
        )
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {_in_words(str(error), raw)}") from None
    _check_options(case.options, source)
    return case


def _check_options(given: Mapping[str, Any], source: str) -> None:
    kinds = dict(types()) if given else {}
    for name, value in given.items():
        if name not in kinds:
            raise UsageError(
                f"{source}: options has no field {name!r}{did_you_mean(name, kinds)} "
                f"(fields: {', '.join(kinds)})"
            )
        if not accepts(name, value):
            raise UsageError(f"{source}: {_refused(f'options.{name}', value, kinds[name])}")


def to_plain(case: Case) -> dict[str, Any]:
    """Convert the case to dicts, lists and numbers."""
    plain: dict[str, Any] = msgspec.to_builtins(case)
    return plain


def merged(case: Case, fields: Mapping[str, Any], *, source: str) -> Case:
    """Return the case with nested `fields` put over it, such as {"training": {"clip": None}}.

    Objects are merged field by field, lists are replaced. Raises UsageError as `decode` does.
    """
    return from_plain(merged_fields(to_plain(case), fields), source=source)


def merged_fields(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested fields as plain data, with the others in place of those that both have."""
    both: dict[str, Any] = msgspec.to_builtins(dict(fields))
    for name, value in msgspec.to_builtins(dict(others)).items():
        if isinstance(value, dict) and isinstance(both.get(name), dict):
            both[name] = {**both[name], **value}
        else:
            both[name] = value
    return both


def _not_json(message: str, data: bytes) -> str:
    if "truncated" in message:
        size = len(data)
        return f"the JSON ends too early, after {size} bytes" if size else "the file is empty"
    found = re.search(r"(?:JSON is malformed: )?(.*?) \(byte (\d+)\)", message)
    if found is None:
        return f"not JSON: {_AT.sub('', message)}"
    return f"not JSON: {found[1]} at {_place(data, int(found[2]))}"


def _place(data: bytes, byte: int) -> str:
    line = data.count(b"\n", 0, byte) + 1
    column = byte - (data.rfind(b"\n", 0, byte) + 1) + 1
    return f"line {line}, column {column}"


def _in_words(message: str, raw: Any) -> str:
    """Return msgspec's message, with the value that was given and the allowed ones."""
    at = _AT.search(message)
    bare = message[: at.start()] if at else message
    path = _parsed(at["path"]) if at else ()
    where = _written(path) or "the case"
    kind = _type_at(path)
    fields = _without_none(kind).fields if _is_struct(_without_none(kind)) else ()
    names = [field.encode_name for field in fields]
    if unknown := _UNKNOWN_FIELD.match(bare):
        name = unknown["name"]
        return (
            f"{where} has no field {name!r}{did_you_mean(name, names)} (fields: {', '.join(names)})"
        )
    if missing := _MISSING_FIELD.match(bare):
        inner = next(f.type for f in fields if f.encode_name == missing["name"])
        return f"{where} lacks the field {missing['name']!r}, {_allowed(inner)}"
    return _refused(where, _value_at(raw, path), kind)


def _refused(where: str, given: Any, kind: Any) -> str:
    """Return the sentence on a value that its type does not allow."""
    hint = ""
    if isinstance(kind, inspect.LiteralType) and isinstance(given, str):
        hint = did_you_mean(given, [str(value) for value in kind.values])
    return f"{where} is {_shown(given)}{hint}; allowed: {_allowed(kind)}"


def _parsed(path: str) -> Path:
    return tuple(name or int(index) for name, index in _PART.findall(path))


def _written(path: Path) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).lstrip(".")


def _is_struct(kind: inspect.Type) -> Any:
    return isinstance(kind, inspect.StructType)


def _without_none(kind: Any) -> Any:
    """Return the first type of a union that is not None; other types as they are."""
    if isinstance(kind, inspect.UnionType):
        return next(k for k in kind.types if not isinstance(k, inspect.NoneType))
    return kind


def _type_at(path: Path) -> Any:
    """Return msgspec's description of the type at a path of the case, looking through None."""
    kind: Any = _CASE_TYPE
    for part in path:
        kind = _without_none(kind)
        if isinstance(part, int):
            kind = kind.item_type
        else:
            kind = next(field.type for field in kind.fields if field.encode_name == part)
    return kind


def _value_at(raw: Any, path: Path) -> Any:
    for part in path:
        raw = raw[part]
    return raw


def _shown(value: Any) -> str:
    """Return the value as in JSON, shortened where it is long."""
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _allowed(kind: Any) -> str:
    """Describe in words the values that a type allows."""
    match kind:
        case inspect.LiteralType():
            return "one of " + ", ".join(_shown(value) for value in kind.values)
        case inspect.IntType():
            return "an integer" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return f"a text of {kind.min_length or 0} to {kind.max_length} characters"
        case inspect.VarTupleType():
            return f"a list of {kind.min_length or 0} to {kind.max_length} elements"
        case inspect.UnionType():
            return " or ".join(_allowed(part) for part in kind.types)
        case inspect.NoneType():
            return "null"
        case inspect.DictType():
            return "an object of integers, texts, true and false"
        case _:
            return "an object"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    signs = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
    parts = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    return " " + " and ".join(parts) if parts else ""
