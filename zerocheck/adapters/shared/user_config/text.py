"""Parsing of a config file into plain data: JSON, as DeepSpeed relaxes it too, YAML, or TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ....errors import UsageError, file_of
from ....foreign_text import toml_of

LARGEST = 1 << 20
"""Bytes; a configuration is a few kilobytes."""

MOST_VALUES = 100_000
"""Values of a YAML file, each alias counted where it stands."""

YAML = (".yaml", ".yml")
"""Endings of the names of files that are YAML."""
TOML = ".toml"
"""Ending of those that are TOML; any other is JSON."""


def plain(name: str, library: str = "trainer") -> dict[str, Any]:
    """Return the object in the file, as dicts, lists and numbers.

    library: whose config it should be, for messages.

    Comments and superfluous commas are read as DeepSpeed reads them, which takes Hjson. Raises
    UsageError, with line and column, for text that is neither, and for a key given twice.
    """
    path = file_of(name)
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{name} is larger than {LARGEST >> 20} MiB: no {library} config")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    if name.endswith(YAML):
        given = _of_yaml(name, text)
    else:
        given = _of_toml(name, text) if name.endswith(TOML) else _of_json(name, text, library)
    if not isinstance(given, dict):
        raise UsageError(f"{name} is no {library} config: it holds {shown(given)}, not an object")
    if {"case", "implementation"} <= given.keys():
        raise UsageError(f"{name} is a case file; run it with: zerocheck replay {name}")
    return given


def shown(value: Any) -> str:
    """Return the value as JSON, shortened where it is long."""
    text = json.dumps(value, default=str)  # YAML has dates too
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_json(name: str, text: str, library: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UsageError(f"{name} has the key {twice!r} twice in one object; leave one out")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        read = _as_hjson(text, once)
        if read is not None:
            return read
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{name} is not JSON: {error.msg} at {where}") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{name} is no {library} config: {error}") from None
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply to be a {library} config") from None


def _of_toml(name: str, text: str) -> Any:
    try:
        return toml_of(text)
    except ValueError as error:
        raise UsageError(f"{name} is not TOML: {error}") from None


def _of_yaml(name: str, text: str) -> Any:
    if find_spec("yaml") is None:
        raise UsageError(f"{name} needs PyYAML, which is not installed: pip install PyYAML")
    yaml = import_module("yaml")
    try:
        return _plainly(name, yaml, yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(f"{name} is not YAML: {problem}{where}") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{name} cannot be read as YAML: {type(error).__name__}") from None


def _plainly(name: str, yaml: Any, node: Any) -> Any:
    """Return plain data of a node of YAML; UsageError for a key given twice."""
    loader = yaml.SafeLoader("")
    for one in _mappings(yaml, node):
        keys = [key.value for key, _ in one.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise UsageError(f"{name} has the key {twice!r} twice in one object; leave one out")
    if node is None:
        return None
    return _with_names(name, loader.construct_document(node), iter(range(MOST_VALUES)))


def _with_names(name: str, value: Any, left: Iterator[int]) -> Any:
    """Return the value with text as keys: YAML reads `on` as true, and 1 as a number.

    left: counts values; UsageError at its end, for aliases within aliases are more than memory has.
    """
    if next(left, None) is None:
        raise UsageError(f"{name} expands to more than {MOST_VALUES:,} values: no config does")
    if isinstance(value, dict):
        return {str(key): _with_names(name, one, left) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_names(name, one, left) for one in value]
    return value


def _mappings(yaml: Any, node: Any) -> Iterator[Any]:
    """Iterate over the mappings of a document, each once."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not isinstance(one, yaml.CollectionNode):
            continue
        seen.add(id(one))
        if isinstance(one, yaml.MappingNode):
            yield one
            waiting += [value for _, value in one.value]
        else:
            waiting += one.value


def _as_hjson(text: str, once: Any) -> Any:
    """Parse a file that is no JSON as DeepSpeed itself does, by hjson; None if that fails.

    hjson is installed where DeepSpeed is. It takes a text without quotes for a string that ends
    with its line: no key of a config has such a value, so the JSON is wrong and not relaxed.
    """
    if find_spec("hjson") is None:
        return None
    hjson = import_module("hjson")
    try:
        found = hjson.loads(text, object_pairs_hook=once)
    except UsageError:
        raise
    except Exception:  # an open comment is an AttributeError or an endless index to it
        return None
    return found if isinstance(found, dict) and not _unquoted(found, text) else None


def _unquoted(value: Any, text: str) -> bool:
    """Return True if a string of `value` is unquoted in the text, or is not valid in JSON."""
    if isinstance(value, dict):
        return any(_unquoted(key, text) or _unquoted(one, text) for key, one in value.items())
    if isinstance(value, list):
        return any(_unquoted(one, text) for one in value)
    return isinstance(value, str) and json.dumps(value, ensure_ascii=False) not in text
