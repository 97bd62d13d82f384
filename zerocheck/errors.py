"""Errors of zerocheck, exit codes, and hints that help a user to fix an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit code of every command."""

    HOLDS = 0
    """All obligations hold, known issues aside; a file is right; a model fits."""
    FAILS = 1
    """A finding, nothing checked for an obligation, or a stale known issue."""
    USAGE = 2
    """An error in the user's input, or a shortage of the machine: UsageError."""
    BROKEN = 3
    """A failure of zerocheck itself, or ranks of a launcher lost: HarnessError, RanksLost."""
    INTERRUPTED = 130
    """Ended by a signal, or by a reader that closed the pipe."""


class ZerocheckError(Exception):
    """Base of all errors that zerocheck raises on purpose."""


class UsageError(ZerocheckError):
    """Error in the user's input.

    The message says what was given, what is allowed and, where there is one, the nearest right
    spelling. The command line prints it without a traceback and exits with code 2.
    """


class HarnessError(ZerocheckError):
    """Failure of zerocheck itself (exit code 3). Please report it with the message."""


class RanksLost(ZerocheckError):
    """Loss of ranks of a launcher, which ends the run (exit code 3, or 1 if it found something).

    Not a failure of the code under test, as far as is known: hosts die for other reasons too.
    """


class Unsupported(ZerocheckError):
    """Refusal of a case by an implementation that cannot run it: raise it with the reason.

    The case gets the verdict `unsupported` and the reason is in the report. Any other exception
    gives the verdict `crashed`.
    """


class Violated(ZerocheckError):
    """Violation of an obligation in a checked step of an attached run. All ranks raise it.

    The message names it and where it was written; rank 0 has printed the finding.
    """


class CheckpointError(ZerocheckError):
    """Failure to write a checkpoint, or to find one that is whole.

    All ranks raise it. After a failed save, the older checkpoint is as it was: make room or give
    the right to write, and save again. After a failed load, nothing was read from a damaged file:
    copy the directory back from where it was right, or load an older one. A checkpoint that is
    refused cannot be repaired.
    """


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return `"; did you mean 'fsdp2'?"` for the nearest allowed word, or an empty string."""
    near = nearest(given, allowed)
    return f"; did you mean {near!r}?" if near else ""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the nearest allowed word, or an empty string if none is near.

    A word is near if it is a third of its letters away, or one letter, or if whole parts of it are
    left out or added: FULL for FULL_SHARD.
    """
    spelled = {name.casefold(): name for name in allowed}
    word = given.casefold()
    close = difflib.get_close_matches(word, list(spelled), n=len(spelled) or 1, cutoff=0.5)
    near = [
        name
        for name in close
        if _distance(word, name) <= max(1, len(word) // 3)
        or _parts(word) < _parts(name)
        or _parts(name) < _parts(word)
    ]
    return spelled[min(near, key=lambda name: _distance(word, name))] if near else ""


def _parts(word: str) -> frozenset[str]:
    """Return the parts between punctuation."""
    return frozenset(filter(None, re.split(r"[\W_]+", word)))


def _distance(word: str, name: str) -> int:
    """Return the edit distance, with a superfluous ending as one edit.

    'cliping' means 'clip' rather than 'clip-inf'.
    """
    if word.startswith(name) and len(word) <= len(name) + len("ing"):
        return min(1, len(word) - len(name))
    return _edits(word, name)


def _edits(word: str, name: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with the next one."""
    rows = [list(range(len(name) + 1))]
    for row, letter in enumerate(word, 1):
        costs = [row]
        for column, other in enumerate(name, 1):
            replaced = rows[-1][column - 1] + (letter != other)
            cost = min(rows[-1][column] + 1, costs[-1] + 1, replaced)
            if row > 1 and column > 1 and (letter, word[row - 2]) == (name[column - 2], other):
                cost = min(cost, rows[-2][column - 2] + 1)
            costs.append(cost)
        rows.append(costs)
    return rows[-1][-1]


def unknown(what: str, given: str, allowed: Iterable[str]) -> UsageError:
    """Return a UsageError for a name that is not one of `allowed`. what: the kind of name."""
    names = sorted(allowed)
    return UsageError(
        f"unknown {what} {given!r}{did_you_mean(given, names)} (allowed: {', '.join(names)})"
    )


def did_you_mean_path(path: Path) -> str:
    """Return `"; did you mean 'report/journal.ndjson'?"` for the nearest path there is, or "".

    A path is near if each of its parts is, or is right.
    """
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if not (found / part).exists():
            try:
                names = sorted(one.name for one in found.iterdir())
            except OSError:
                return ""
            part = nearest(part, names)
            if not part:
                return ""
        found /= part
    return "" if found == path else f"; did you mean {str(found)!r}?"


def file_of(name: str) -> Path:
    """Return the path of the file of that name.

    Raises UsageError if it does not exist, with the nearest one of its kind in its folder, or with
    the folder if that is missing.
    """
    try:
        path = Path(name).resolve()
    except RuntimeError as error:  # a loop of links
        raise UsageError(f"there is no file {name!r}: {error}") from None
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"{name!r} is a folder; name a file in it")
    if path.exists():
        raise UsageError(f"{name!r} is no regular file; name one")
    if not path.parent.is_dir():
        missing = next(p for p in reversed(path.parents) if not p.is_dir())
        hint = did_you_mean(missing.name, _names(missing.parent, ""))
        raise UsageError(f"there is no file {name!r}: there is no folder {str(missing)!r}{hint}")
    stem = nearest(path.stem, [Path(n).stem for n in _names(path.parent, path.suffix)])
    hint = f"; did you mean {str(Path(name).with_name(stem + path.suffix))!r}?" if stem else ""
    raise UsageError(f"there is no file {name!r}{hint} (looked at {path})")


def _names(folder: Path, suffix: str) -> list[str]:
    """Return the names of files in a folder that end with `suffix`, or of folders if it is ""."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [p.name for p in entries if (p.suffix == suffix if suffix else p.is_dir())]


DEPENDENCIES = (
    "click",
    "cloudpickle",
    "hypothesis",
    "jinja2",
    "msgspec",
    "numpy",
    "packaging",
    "pytest",
    "rich",
    "tabulate",
    "torch",
)
"""Packages that an installation brings, by the names under which they are imported."""


def not_installed(error: BaseException) -> str | None:
    """Return what to do where an import failed since zerocheck runs from its source, else None."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if package not in DEPENDENCIES:
        return None
    return (
        f"zerocheck needs {package}, which is not installed here; in its source tree: "
        "pip install -c constraints.txt -e ."
    )


def few(names: Sequence[str], most: int = 1) -> str:
    """Return the first names and how many more there are: `"a, b and 3 more"`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def failing(words: str) -> Iterator[None]:
    """Turn errors of other code into a UsageError that begins with these words."""
    try:
        yield
    except ZerocheckError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{words}: {type(error).__name__}: {message}") from error
