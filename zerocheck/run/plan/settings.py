"""Settings of a run that a project keeps: one table for the command line, pytest and TOML.

Each is a field of RunOptions, an option of `zerocheck run`, an option `--zerocheck-NAME` and an ini
option `zerocheck_NAME` of pytest, and a key of `[tool.zerocheck]` in pyproject.toml. pytest loads
this file in every session of an environment, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UsageError, unknown
from ...foreign_text import toml_of

Kind = Literal["text", "whole number", "switch", "folder", "names", "whole numbers", "files"]

_LONGEST_RANGE = 1024

TABLE = "[tool.zerocheck]"
FILE = "pyproject.toml"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of a run. default: as the help says it; help: one sentence."""

    name: str
    kind: Kind
    help: str
    default: str = ""
    metavar: str = "NAME"

    @property
    def option(self) -> str:
        """Name of the setting on a command line, without a prefix: `max-cases`."""
        return self.name.replace("_", "-")

    @property
    def description(self) -> str:
        """Help text with the default."""
        return f"{self.help} [default: {self.default}]" if self.default else self.help

    def of_text(self, text: str) -> Any:
        """Parse a value typed on a command line or in an ini file.

        Raises UsageError, which does not name the setting's source.
        """
        text = text.strip()
        match self.kind:
            case "whole number":
                return self._number(text)
            case "whole numbers":
                return tuple(n for part in text.split(",") for n in self._range(part.strip()))
            case "switch":
                values = {"true": True, "yes": True, "false": False, "no": False}
                if text.casefold() not in values:
                    raise unknown(f"value of {self.name}", text, values)
                return values[text.casefold()]
            case "folder":
                if not text:
                    raise UsageError(f"{self.name} is empty; . is the current directory")
                return Path(text)
            case "names" | "files":
                split = "," if self.kind == "names" else "\n"
                return tuple(part.strip() for part in text.split(split) if part.strip())
        return text

    def of_python(self, value: Any) -> Any:
        """Convert a value of Python code, where text is parsed as on a command line.

        Raises UsageError for another type.
        """
        if isinstance(value, str | os.PathLike):
            return self.of_text(os.fspath(value))
        if isinstance(value, Iterable):
            value = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
        return self.of_toml(value)

    def of_toml(self, given: Any) -> Any:
        """Convert a value of a TOML file. Raises UsageError for another type."""
        allowed: dict[Kind, tuple[str, type | tuple[type, ...]]] = {
            "text": ("a string", str),
            "whole number": ("a whole number", int),
            "switch": ("true or false", bool),
            "folder": ("a string", str),
            "names": ("a list of strings", str),
            "whole numbers": ("a list of whole numbers", int),
            "files": ("a list of strings", str),
        }
        words, kind = allowed[self.kind]
        several = words.startswith("a list")
        if several and kind is str and isinstance(given, str):
            return self.of_text(given)
        items = given if several and isinstance(given, list) else [given]
        right = isinstance(given, list) is several and all(
            isinstance(item, kind) and (kind is bool or not isinstance(item, bool))
            for item in items
        )
        if not right:
            raise UsageError(f"{self.name} is {words}, not {given!r}")
        if several:
            return tuple(items)
        return Path(given) if self.kind == "folder" else given

    def _range(self, text: str) -> Sequence[int]:
        """Parse `3`, or the range `2-4`, which includes both ends."""
        found = re.fullmatch(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})", text)
        if found is None:
            return [self._number(text)]
        first, last = int(found[1]), int(found[2])
        if last < first:
            raise UsageError(f"the range {text!r} is empty; did you mean '{last}-{first}'?")
        if last - first >= _LONGEST_RANGE:
            raise UsageError(f"the range {text!r} has more than {_LONGEST_RANGE} numbers")
        return range(first, last + 1)

    def _number(self, text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text):  # int() takes the digits of every script
            return int(text)
        what = {"world_sizes": "world size"}.get(self.name, self.name.replace("_", " "))
        example = " (example: 1,2,3 or 2-4)" if self.kind == "whole numbers" else ""
        raise UsageError(f"{what} {text!r} is not a whole number{example}")


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            name="profile",
            kind="text",
            default="quick",
            help="Which cases: smoke (a first look, which is taken where nothing is named), quick, "
            "ci (all pairs of features) or thorough.",
        ),
        Setting(
            name="world_sizes",
            kind="whole numbers",
            metavar="1,2,3",
            default="the profile's",
            help="Numbers of ranks.",
        ),
        Setting(
            name="seed",
            kind="whole number",
            metavar="N",
            default="0",
            help="What cases are drawn from: another number, other cases.",
        ),
        Setting(
            name="max_cases",
            kind="whole number",
            metavar="N",
            default="the profile's",
            help="Drawn cases per implementation at most; those of known faults come on top.",
        ),
        Setting(
            name="obligations",
            kind="names",
            metavar="NAMES",
            default="equivalence",
            help="What to check, with commas between: equivalence (every step), resume "
            "(checkpoints), memory (bytes and collectives), or single ones.",
        ),
        Setting(
            name="optimizer",
            kind="text",
            default="adamw",
            help="Optimizer of every case: adamw, adam, adagrad, rmsprop, sgd, muon for "
            "matrices with adamw for all else; or, judged by torch's own, run unsharded: nadam, "
            "radam, adamax, adadelta, rprop, asgd, adafactor; or your own class, judged in the "
            "same way: path/to/file.py:Class.",
        ),
        Setting(
            name="known_issues",
            kind="files",
            metavar="FILE",
            help="Findings that do not fail the run, in addition to ours; none: without ours. "
            "May be given several times.",
        ),
        Setting(
            name="shrink",
            kind="switch",
            default="shrink",
            help="Look for the smallest case of each finding, at the end.",
        ),
        Setting(
            name="report_dir",
            kind="folder",
            metavar="DIR",
            default="zerocheck-report",
            help="Where the journal, the reports and the cases to replay are written.",
        ),
    )
}
"""Name -> setting, in the order of the help."""

SPECIAL = "none"
"""In a list of files, what is no file."""


def placed(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `values` with their paths taken from `folder`, where their file is."""

    def path(name: str) -> str:
        return name if name == SPECIAL else str(folder / name)

    found = dict(values)
    for name, value in values.items():
        kind = SETTINGS[name].kind
        if kind == "files":
            found[name] = tuple(map(path, value))
        elif kind == "folder":
            found[name] = folder / value
    return found


def project_settings(start: Path) -> dict[str, Any]:
    """Read `[tool.zerocheck]` in the pyproject.toml of `start` or the nearest folder above.

    Empty if none has the table. Paths in it are taken from the file's folder. Raises UsageError
    that names the file, for one that cannot be read, and for what is no setting.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        file = folder / FILE
        if not file.is_file():
            continue
        table = _table(file)
        if table is not None:
            where = f"{file}, {TABLE}"
            values = placed(checked(_values(table, where), where), folder)
            return {name: _short(value) for name, value in values.items()}
    return {}


def _table(file: Path) -> Mapping[str, Any] | None:
    try:
        data = toml_of(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # TOML, UTF-8, or a number of thousands of digits
        raise UsageError(f"{file} is not TOML: {error}") from error
    tool = data.get("tool", {})
    table = tool.get("zerocheck") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{file}: tool.zerocheck is a table, not {table!r}")
    return table


def _values(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = {}
    for name, given in table.items():
        try:
            if name not in SETTINGS:
                raise unknown("key", name, SETTINGS)
            values[name] = SETTINGS[name].of_toml(given)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return values


def _short(value: Any) -> Any:
    """Return a folder below this one by its path from here, so that replay commands stay short."""
    if isinstance(value, Path) and value.is_relative_to(Path.cwd()):
        return value.relative_to(Path.cwd())
    return value


def of_texts(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """Parse values of settings as they were typed. Raises UsageError, `where` before it."""
    values = {}
    for name, text in texts.items():
        try:
            values[name] = SETTINGS[name].of_text(text)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return checked(values, where)


def of_python(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of Python code; those that are None are left out. Raises UsageError."""
    return {
        name: SETTINGS[name].of_python(value) for name, value in values.items() if value is not None
    }


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Parse `"1,2,3"` or `"2-4"`. Raises UsageError for anything but numbers."""
    return SETTINGS["world_sizes"].of_text(text)  # type: ignore[no-any-return]


def checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, if a run could have them, files aside. UsageError has `where` before it."""
    if values:
        from .options import RunOptions

        rest = {name: value for name, value in values.items() if SETTINGS[name].kind != "files"}
        try:
            RunOptions(**as_options(rest))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    return dict(values)


def as_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of RunOptions, with sets of obligations spelled out.

    Raises UsageError for other obligations.
    """
    from .options import parse_obligations

    options = dict(values)
    if "obligations" in options:
        options["obligations"] = parse_obligations(",".join(options["obligations"]))
    return options
