"""The pytest plugin: command-line and ini options, report directories, terminal summary.

It is loaded in every pytest session of an environment that has zerocheck installed, so it imports
neither torch nor what takes time.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from . import pytest_progress
from .errors import UsageError
from .foreign_text import printable
from .run.plan.settings import SETTINGS, of_texts, placed, project_settings

if TYPE_CHECKING:
    from .run.records.tally import Tally
    from .shared_run import SharedRun

_PREFIX = "zerocheck_"


class _Session:
    """Options and runs of this pytest session.

    under, over: settings of lower and of higher precedence than those of a test; directory: where
    runs write; id: the same on all workers; runs: those that tests were collected for; write:
    prints a line of progress; watch: of the runs of workers.
    """

    def __init__(self) -> None:
        self.under: dict[str, Any] = {}
        self.over: dict[str, Any] = {}
        self.directory: Path | None = None
        self.id = uuid.uuid4().hex
        self.runs: list[SharedRun] = []
        self.write: pytest_progress.Write | None = None
        self.watch: pytest_progress.JournalWatch | None = None

    def place(self) -> Path:
        """Return the directory, made where pytest has no cache."""
        if self.directory is None:
            self.named().mkdir(mode=0o700, exist_ok=True)
        return self.named()

    def named(self) -> Path:
        """Return the directory, which may not be there yet."""
        return self.directory or Path(tempfile.gettempdir()) / f"zerocheck-{self.id}"


_session = _Session()


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a test's settings with those of files, which yield, and the command line's."""
    found = {**_session.under, **given, **_session.over}
    found.pop("report_dir", None)
    return found


def case_folder() -> Path:
    """Return the folder of case files of tests that judge single cases."""
    return _session.place() / "findings"


def result_of(run: SharedRun) -> Tally:
    """Return the counts of a run, made by this worker or another one."""
    write = _session.write
    handlers = () if write is None else (pytest_progress.RunLines(write),)
    return run.result(_session.place(), _session.id, _session.runs, handlers)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--zerocheck-NAME` and the ini option `zerocheck_NAME` for every setting."""
    group = parser.getgroup("zerocheck")
    for setting in SETTINGS.values():
        files = setting.kind == "files"
        kind: Literal["linelist", "string"] = "linelist" if files else "string"
        parser.addini(
            _PREFIX + setting.name,
            f"zerocheck: {setting.description}",
            type=kind,
            default=None,
        )
        group.addoption(
            f"--zerocheck-{setting.option}",
            metavar="yes|no" if setting.kind == "switch" else setting.metavar,
            action="append" if files else "store",
            default=None,
            help=setting.description,
        )


def pytest_configure(config: pytest.Config) -> None:
    """Take the settings; decide where reports go: as set, pytest's cache, or elsewhere."""
    global _session
    _session = _Session()
    try:
        _session.under = {**project_settings(config.rootpath), **_from_ini(config)}
        _session.over = _from_options(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    _session.id = getattr(config, "workerinput", {}).get("testrunuid", _session.id)
    directory = {**_session.under, **_session.over}.get("report_dir")
    cache: Any = getattr(config, "cache", None)
    if directory is None and cache is not None:
        directory = Path(cache.mkdir("zerocheck"))
    if directory is not None and directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())  # so that commands to replay stay short
    _session.directory = directory


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show the progress of runs: of those here, or of those of workers."""
    write = _session.write = pytest_progress.writer(session.config)
    if write is not None and pytest_progress.controls_workers(session.config):
        _session.watch = pytest_progress.JournalWatch(_session.named(), time.time(), write)


def pytest_unconfigure() -> None:
    """End the rank processes of tests that judged single cases, and the watch."""
    if _session.watch is not None:
        _session.watch.stop()
    shared = sys.modules.get("zerocheck.shared_ranks")
    if shared is not None:
        shared.close()


def _from_ini(config: pytest.Config) -> dict[str, Any]:
    folder = config.inipath.parent if config.inipath is not None else config.rootpath
    texts = {}
    for setting in SETTINGS.values():
        given = config.getini(_PREFIX + setting.name)
        if given is not None:
            between = "\n" if setting.kind == "files" else ","
            texts[setting.name] = given if isinstance(given, str) else between.join(given)
    return placed(of_texts(texts, f"{_PREFIX}* in {config.inipath}"), folder)


def _from_options(config: pytest.Config) -> dict[str, Any]:
    texts = {}
    for setting in SETTINGS.values():
        given = config.getoption(f"--zerocheck-{setting.option}")
        if given is not None:
            texts[setting.name] = given if isinstance(given, str) else "\n".join(given)
    return of_texts(texts, "--zerocheck-* on the command line")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group all checks of a run on one worker with `--dist loadgroup`; others do the rest."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        run = _run_of(item)
        if run is not None:
            item.add_marker(pytest.mark.xdist_group(f"zerocheck-{run.key}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the runs of the tests that were selected."""
    runs = {run.key: run for run in map(_run_of, session.items) if run is not None}
    _session.runs = list(runs.values())


def _run_of(item: pytest.Item) -> SharedRun | None:
    callspec = getattr(item, "callspec", None)
    run = getattr(callspec.params.get("check"), "run", None) if callspec is not None else None
    return run if isinstance(getattr(run, "key", None), str) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Show a finding as the console does, and say where the report of its run is."""
    report = yield
    run = _run_of(item)
    if run is None or report.when != "call":
        return report
    report.zerocheck_run = str(_session.place() / run.key)  # pytest-xdist sends it along
    error = None if call.excinfo is None else call.excinfo.value
    detail = getattr(error, "detail", None)
    if call.excinfo is not None and isinstance(error, UsageError):
        error.args = (printable(str(error)),)
        report.longrepr = call.excinfo.getrepr(style="value")  # as the command line says it
    elif call.excinfo is not None and detail is not None:
        report.longrepr = shown = call.excinfo.getrepr(style="value")  # without our lines of code
        if shown.reprcrash is not None:
            shown.reprcrash.message = str(error)  # in the summary: the title, not our class
        if detail:
            report.sections.append(("stacks and output of the ranks", printable(detail)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the reports that were written; say the same in GitHub's words where it listens."""
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    places = {getattr(report, "zerocheck_run", None): None for report in reports}
    for directory in (Path(place) for place in places if place is not None):
        if (directory / "report.html").is_file():
            terminalreporter.write_line(f"zerocheck report: {directory / 'report.html'}")
            _publish(directory / "journal.ndjson", terminalreporter)


def _publish(journal: Path, terminalreporter: Any) -> None:
    from .report import github
    from .run.records.journal import read
    from .run.records.tally import tally

    if github.listening():
        github.publish(tally(read(journal)), terminalreporter.write_line)
