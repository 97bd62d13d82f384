"""Trials of the command line with hostile input: each ends with a verdict or a refusal in words."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

from click.testing import CliRunner, Result

from zerocheck.cli import main

FAKED = "  replay      zerocheck replay evil"
"""A line that a report could have, and that only a newline in foreign text can bring."""

ESCAPES = "\x1b]0;owned\x07\x9b2J\x00\r\u202e\u2028\x7f"
"""Sets the title of a terminal, clears it, overwrites a line, turns text around."""

POISON = (
    f"[red]x[/red] <b>|`\\{ESCAPES}\n{FAKED}\n## faked\n::error::faked\n"
    "  ::add-mask::y ##[error]z @team #1"
)


def trial(*args: object, codes: tuple[int, ...] = (0, 1, 2)) -> Result:
    """Run the command line in this process; fails for another exit code, or a traceback."""
    result = CliRunner().invoke(main, list(map(str, args)))
    message = result.output[-2000:]
    assert result.exit_code in codes, f"{args}: exit code {result.exit_code}\n{message}"
    assert "Traceback" not in result.output, message
    assert_lines(result.output)
    if result.exit_code == 2:
        assert "error: " in result.output, message
    return result


def refused(*args: object) -> str:
    """Run a command that has to be refused; what it says."""
    result = trial(*args)
    assert result.exit_code == 2, result.output
    return result.stderr


def assert_printable(text: str) -> None:
    """Nothing in a text moves a cursor or hides itself."""
    bad = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
    assert not bad, f"{bad} in {text[-2000:]}"


def assert_lines(text: str) -> None:
    """The same, and no line of it is faked."""
    assert_printable(text)
    # A runner obeys `::` behind blanks too, and `##[` wherever it is.
    faked = [
        line
        for line in text.split("\n")
        if line.startswith((FAKED, "## faked")) or line.lstrip().startswith("::") or "##[" in line
    ]
    assert not faked, text[-2000:]


def damaged(data: bytes, seed: object) -> bytes:
    """The bytes with one to three of: flipped bits, cuts, copies, zeros, other numbers, noise."""
    drawn = random.Random(f"damage {seed}")
    for _ in range(drawn.randint(1, 3)):
        data = drawn.choice(_DAMAGES)(data, drawn) if data else b"\x00"
    return data


def _flip(data: bytes, drawn: random.Random) -> bytes:
    place = drawn.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << drawn.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, drawn: random.Random) -> bytes:
    return data[: drawn.randrange(len(data))]


def _drop(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _range(data, drawn)
    return data[:start] + data[stop:]


def _repeat(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _range(data, drawn)
    return data[:stop] + data[start:]


def _zero(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _range(data, drawn)
    return data[:start] + bytes(stop - start) + data[stop:]


def _noise(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _range(data, drawn)
    return data[:start] + drawn.randbytes(stop - start) + data[stop:]


def _range(data: bytes, drawn: random.Random) -> tuple[int, int]:
    start = drawn.randrange(len(data))
    return start, min(len(data), start + drawn.choice((1, 4, 16, 200)))


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _flip, _cut, _drop, _repeat, _zero, _noise,
)  # fmt: skip

VALUES = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**400, 1.5, 1e300, "nan", "inf", "-inf", "",
    "torch.float32", POISON, "x" * 5000, [], [0], {}, {"a": 1}, [[[[]]]], "../../etc/passwd",
)  # fmt: skip
"""What stands in the place of another value: other types, extremes, hostile text."""


def mutated(tree: object, seed: object) -> object:
    """Plain data with one to three values replaced, left out, doubled or exchanged."""
    drawn = random.Random(f"mutation {seed}")
    for _ in range(drawn.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            break
        above, key = drawn.choice(places)
        match drawn.randrange(5):
            case 0 | 1 | 2:
                above[key] = drawn.choice(VALUES)  # type: ignore[index]
            case 3:
                del above[key]  # type: ignore[attr-defined]
            case _:
                other, its = drawn.choice(places)
                above[key] = copy.deepcopy(other[its])  # type: ignore[index]
    return tree


def _places(tree: object) -> Iterator[tuple[object, object]]:
    """Every mapping or list with each of its keys, all levels."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)  # type: ignore[arg-type]
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, dict | list) and value:
            yield from _places(value)
