"""The pytest plugin: where checks leave their reports, and what the summary says of them.

It is loaded in every pytest session of an environment that has zerocheck installed, so it imports
neither torch nor the rest of zerocheck.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

_directory: Path | None = None
_reports: list[Path] = []
_known_issues: tuple[str, ...] = ()


def report_directory(name: str) -> Path:
    """Where the run called `name` writes. Each worker of pytest-xdist has its own place."""
    global _directory
    if _directory is None:
        _directory = Path(tempfile.mkdtemp(prefix="zerocheck-"))
    directory = _directory / os.environ.get("PYTEST_XDIST_WORKER", "") / name
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())  # so that commands to replay stay short
    _reports.append(directory)
    return directory


def known_issues() -> tuple[str, ...]:
    """Files of known issues, from the ini option."""
    return _known_issues


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--zerocheck-report-dir`, and `zerocheck_known_issues` in the ini file."""
    parser.addini(
        "zerocheck_known_issues",
        "files of known issues for parametrize_with_checks, beside ours; none: without ours",
        type="linelist",
    )
    parser.getgroup("zerocheck").addoption(
        "--zerocheck-report-dir",
        metavar="DIR",
        help="where parametrize_with_checks leaves its journals, reports and cases to replay",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Take the ini option; decide where reports go: the option, pytest's cache, or elsewhere."""
    global _directory, _known_issues
    folder = config.inipath.parent if config.inipath is not None else config.rootpath
    listed = config.getini("zerocheck_known_issues")
    _known_issues = tuple(name if name == "none" else str(folder / name) for name in listed)
    given = config.getoption("--zerocheck-report-dir")
    cache: Any = getattr(config, "cache", None)
    if given:
        _directory = Path(given)
    elif cache is not None:
        _directory = Path(cache.mkdir("zerocheck"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, all checks of one run go to one worker, since they share it."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        callspec = getattr(item, "callspec", None)
        run = getattr(callspec.params.get("check"), "run", None) if callspec is not None else None
        key = getattr(run, "key", None)
        if isinstance(key, str):
            item.add_marker(pytest.mark.xdist_group(f"zerocheck-{key}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the reports that were written."""
    written = [directory / "report.md" for directory in _reports]
    for path in written:
        if path.is_file():
            terminalreporter.write_line(f"zerocheck report: {path}")
