"""What a command found, printed and, where that is asked for, written as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError


def shown(report: Any, text: str, json_file: Path | None) -> int:
    """Print the text, write the report into the file; the report's exit code.

    Raises UsageError if the file cannot be written.
    """
    import msgspec

    click.echo(text, nl=False)
    if json_file is not None:
        try:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        except OSError as error:
            raise UsageError(f"{str(json_file)!r} cannot be written: {error.strerror}") from error
    return int(report.exit_code)
