"""Output of a run for GitHub Actions: annotations, and the summary of the job.

Annotations are lines of output, `::error file=F,line=N,title=T::MESSAGE`, with the escapes of
GitHub's toolkit (actions/toolkit, packages/core/src/command.ts). The summary is Markdown in the
file that GITHUB_STEP_SUMMARY names; GitHub takes 1024 KiB of it for one step and drops more. It
shows ten annotations of each kind per step.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from ..foreign_text import one_line, printable
from ..run.records.finding_text import finding_lines
from ..run.records.tally import Tally, why_of
from . import markdown
from .known_issues import stale_lines

SUMMARY_BYTES = 1024 * 1024
"""Of one step, all that it writes together."""

CUT = (
    "\n\n**The rest is left out: GitHub takes 1 MiB for the summary of a step. "
    "The whole report is report.md in the report directory.**\n"
)


def listening() -> bool:
    """Return True in GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def publish(counted: Tally, write: Callable[[str], object]) -> None:
    """Print the annotations of a run, and add its report to the summary of the job."""
    for line in commands(counted):
        write(line)
    try:
        summarize(markdown.render(counted))
    except OSError as error:
        message = f"cannot write the summary of the job: {error.strerror}"
        write(_command("warning", ["zerocheck", message]))


def commands(counted: Tally) -> list[str]:
    """Return one error for each finding and other reason to fail, and notices for known issues."""
    lines = []
    for finding in counted.findings:
        lines.append(_command("error", finding_lines(finding), finding.implementation))
    for name in counted.implementations:
        if not counted.findings_of(name):
            lines += [
                _command("error", ["zerocheck", message], name) for message in why_of(counted, name)
            ]
    for stale in counted.stale:
        lines.append(_command("error", stale_lines(stale), stale.implementation))
    if not counted.complete:
        message = f"interrupted after {counted.cases} of {counted.planned} cases"
        lines.append(_command("warning", ["zerocheck", message]))
    for finding in counted.unreproduced:
        lines.append(_command("warning", finding_lines(finding), finding.implementation))
    for finding in counted.known:
        lines.append(_command("notice", finding_lines(finding), finding.implementation))
    return lines


def summarize(text: str) -> None:
    """Add Markdown to the summary of the step, as much as GitHub takes. Raises OSError."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    with open(name, "ab") as file:
        file.write(fitting(text, SUMMARY_BYTES - file.tell()))


def fitting(text: str, room: int) -> bytes:
    """Encode `text` in UTF-8, truncated at the end of a line if it is too long.

    With the sentence that says so it takes `room` bytes at most.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= room:
        return data
    fence = "\n```"
    cut = data[: max(0, room - len(CUT.encode()) - len(fence))]
    cut = cut[: cut.rfind(b"\n") + 1]
    if sum(line.startswith(b"```") for line in cut.split(b"\n")) % 2:
        cut += fence.encode()
    return (cut + CUT.encode())[: max(0, room)]


def _command(kind: str, lines: Sequence[str], implementation: str = "") -> str:
    """Format an annotation. lines: the title, and the message below it."""
    title, *rest = lines
    file, line = where(implementation)
    properties = {"file": file, "line": str(line) if line else "", "title": one_line(title)}
    fields = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{kind} {fields}::{_data(printable(chr(10).join(rest)))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def where(implementation: str) -> tuple[str, int]:
    """Return (file, line) of a user's implementation, the file relative to the repository's root.

    Nothing is imported to find it. The file is empty for code that comes with zerocheck, or is
    elsewhere.
    """
    place, colon, name = implementation.partition("+")[0].rpartition(":")
    if not colon or place.split(".")[0] == "zerocheck":
        return "", 0
    path = Path(place) if place.endswith(".py") else _module_file(place)
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    if path is None or not path.is_file() or not path.resolve().is_relative_to(root):
        return "", 0
    return path.resolve().relative_to(root).as_posix(), _line(path, name)


def _module_file(module: str) -> Path | None:
    """Return the file of a module, found as Python finds it."""
    folders = [str(Path.cwd()), *sys.path]
    found = None
    for part in module.split("."):
        found = PathFinder.find_spec(part, folders)
        if found is None:
            return None
        folders = list(found.submodule_search_locations or ())
    return Path(found.origin) if found is not None and found.origin else None


def _line(path: Path, name: str) -> int:
    """Return the line of the class's or function's definition, 1 if it is not found."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return 1
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node.lineno
    return 1
