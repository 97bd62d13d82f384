"""Output of every report format into one directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..errors import UsageError
from ..foreign_text import plain_json, printable
from ..run.records.matrix_records import MatrixRecord
from ..run.records.matrix_summary import Summary
from ..run.records.records import Record
from ..run.records.tally import Tally, tally
from . import (
    comment,
    comparison_text,
    conformance,
    faults_json,
    faults_markdown,
    html,
    json_report,
    junit,
    markdown,
)
from .comparison import Changes
from .replace_file import replace_file

FORMATS: dict[str, Callable[[Tally], str]] = {
    "report.json": json_report.render,
    "report.html": html.render,
    "report.md": markdown.render,
    "conformance.md": conformance.render,
    "junit.xml": junit.render,
    comment.FILE: comment.render,
}
"""File name of each format, and what renders it."""

MATRIX_FORMATS: dict[str, Callable[[Summary], str]] = {
    "faults.json": faults_json.render,
    "faults.md": faults_markdown.render,
}
"""The same for the kill matrix."""

AGAINST_FORMATS: dict[str, Callable[[Changes], str]] = {
    "against.json": comparison_text.as_json,
    "against.md": comparison_text.markdown,
}
"""The same for a comparison with an earlier run."""


def write_reports(records: Iterable[Record], directory: Path) -> list[Path]:
    """Write all formats, each one whole or not at all. Returns the files.

    Raises UsageError if the directory cannot be written.
    """
    counted = tally(records)
    return write_texts(directory, {name: render(counted) for name, render in FORMATS.items()})


def write_matrix(records: Iterable[MatrixRecord], directory: Path) -> list[Path]:
    """Write all formats for the records of a kill matrix, as `write_reports` does for a run."""
    summary = Summary(records)
    return write_texts(
        directory, {name: render(summary) for name, render in MATRIX_FORMATS.items()}
    )


def write_changes(counted: Tally, changes: Changes, directory: Path) -> list[Path]:
    """Write all formats for a comparison with an earlier run, and the comment anew."""
    texts = {name: render(changes) for name, render in AGAINST_FORMATS.items()}
    return write_texts(directory, {**texts, comment.FILE: comment.render(counted, changes)})


def write_texts(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files, each one whole or not at all. Raises UsageError if the directory cannot be."""
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            written.append(directory / name)
            replace_file(directory / name, _clean(name, text).encode())
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from error
    return written


def _clean(name: str, text: str) -> str:
    """Make a file's text printable, whatever the names and errors in it are."""
    return plain_json(text.encode()).decode() if name.endswith(".json") else printable(text)
