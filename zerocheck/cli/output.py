"""Output of the command line: everything that it prints is made printable here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..foreign_text import as_json, indented, printable


def say(text: object, *, nl: bool = True) -> None:
    """Print the result of a command. Its lines stay apart, so names in it must be one line each."""
    click.echo(printable(str(text)), nl=nl)


def annotate(command: str) -> None:
    """Print a workflow command of GitHub, whose parts are printable already."""
    click.echo(command)


def remark(text: str) -> None:
    """Print an error or a note to stderr; further lines of it are indented."""
    click.echo(indented(text), err=True)


class ProgressLines:
    """Progress of a command on stderr: nothing in the first seconds, then a line at intervals."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._last = time.monotonic()

    def notify(self, text: str) -> None:
        """Print the text if the last line, or the start, is long ago."""
        now = time.monotonic()
        if now - self._last >= self._interval_s:
            self._last = now
            remark(text)


def shown(report: Any, text: str, json_file: Path | None) -> int:
    """Print the text, write the report into the file; return the report's exit code.

    Raises UsageError if the file cannot be written.
    """
    say(text, nl=False)
    if json_file is not None:
        try:
            json_file.write_bytes(as_json(report))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{str(json_file)!r} cannot be written: {reason}") from error
    return int(report.exit_code)
