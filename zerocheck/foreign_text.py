"""Foreign text, made safe for a terminal, a report or a shell.

Names of tensors and files, errors, notes and titles come from elsewhere. An escape sequence in
them can set the title of a terminal, move its cursor or hide text; a newline can fake a line of a
report. All output passes through `printable`: the console of `report`, `say` of `cli`, and every
format of reports.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable
from typing import Any

_INDENT = "  "
_COMMAND = re.compile(r"^[^\S\n]*:(?=:)|##(?=\[)", re.MULTILINE)
"""Commands of GitHub Actions, as its runner finds them in the output of a step."""
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e\n]")


MOST_PARTS = 100
"""Parts of a dotted key of TOML: tomllib takes as many steps for each of them."""
_LONG_KEY = re.compile(
    rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}"  # no second try of a start
)


def toml_of(text: str) -> dict[str, Any]:
    """Parse TOML in a time that grows as its size does. Raises ValueError for what is none."""
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def printable(text: str) -> str:
    """Remove from `text` what could move a cursor, end an XML document or hide itself.

    Newlines and tabs stay; every other character that cannot be printed becomes its escape. What a
    CI would obey, `::error::` at the start of a line and `##[error]` anywhere, gets a space.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)
    return _COMMAND.sub(r"\g<0> ", text)


def one_line(text: str) -> str:
    """Return `text` as one line of printable characters."""
    return " ".join(printable(text).split())


def indented(text: str) -> str:
    """Return printable text with its further lines indented, so that none passes for a message."""
    return printable(text).replace("\n", f"\n{_INDENT}")


def copyable(command: Iterable[str]) -> str:
    """Return a command to copy into a shell: one line, every word quoted where necessary.

    A word with control characters is quoted as `$'...'`, which bash, zsh and ksh read.
    """
    return " ".join(map(_word, command))


def _word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_in_shell, word)) + "'"


def _in_shell(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    # Byte by byte, as file names are: also those that are not UTF-8.
    escaped = "\udc80" <= character <= "\udcff"
    data = character.encode("utf-8", "surrogateescape" if escaped else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in data)  # three digits: what follows is no digit of it


def as_json(value: Any) -> bytes:
    """Return indented JSON with every character that cannot be printed as `\\uXXXX`.

    A lone surrogate of a file name or of a pickle, which no JSON in UTF-8 can hold, becomes its
    escape as text.
    """
    import msgspec  # not where only text is wanted

    plain = encodable(msgspec.to_builtins(value))
    return plain_json(msgspec.json.format(msgspec.json.encode(plain), indent=2))


def plain_json(data: bytes) -> bytes:
    """Escape every character of the JSON that cannot be printed as `\\uXXXX`."""
    return _BEYOND_ASCII.sub(lambda found: _in_json(found[0]), data.decode()).encode()


def encodable(value: Any) -> Any:
    """Return plain data whose texts can all be encoded in UTF-8."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {encodable(key): encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [encodable(item) for item in value]
    return value


def _in_json(character: str) -> str:
    if character.isprintable():
        return character
    data = character.encode("utf-16-be")
    pairs = (data[at : at + 2] for at in range(0, len(data), 2))
    return "".join(f"\\u{int.from_bytes(pair, 'big'):04x}" for pair in pairs)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
