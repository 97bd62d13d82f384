"""The pytest plugin: command-line and ini options, report directories, terminal summary.

It is loaded in every pytest session of an environment that has zerocheck installed, so it imports
neither torch nor what takes time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from .errors import UsageError
from .foreign_text import printable
from .run.plan.settings import SETTINGS, of_texts, placed, project_settings
from .testing import progress
from .testing.session import current, start

if TYPE_CHECKING:
    from .testing.shared_run import SharedRun

_PREFIX = "zerocheck_"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--zerocheck-NAME` and the ini option `zerocheck_NAME` for every setting."""
    group = parser.getgroup("zerocheck")
    for setting in SETTINGS.values():
        files = setting.kind == "files"
        kind: Literal["linelist", "string"] = "linelist" if files else "string"
        parser.addini(
            _PREFIX + setting.name, f"zerocheck: {setting.description}", type=kind, default=None
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
    session = start()
    try:
        session.under = {**project_settings(config.rootpath), **_from_ini(config)}
        session.over = _from_options(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    session.id = getattr(config, "workerinput", {}).get("testrunuid", session.id)
    directory = {**session.under, **session.over}.get("report_dir")
    cache: Any = getattr(config, "cache", None)
    if directory is None and cache is not None:
        directory = Path(cache.mkdir("zerocheck"))
    if directory is not None and directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())  # so that commands to replay stay short
    session.directory = directory


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show the progress of runs: of those here, or of those of workers."""
    ours = current()
    write = ours.write = progress.writer(session.config)
    if write is not None and progress.controls_workers(session.config):
        ours.watch = progress.JournalWatch(ours.named(), time.time(), write)


def pytest_unconfigure() -> None:
    """End the rank processes of tests that judged single cases, and the watch."""
    watch = current().watch
    if watch is not None:
        watch.stop()
    shared = sys.modules.get("zerocheck.run.execute.shared_ranks")
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
    current().runs = list(runs.values())


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
    report.zerocheck_run = str(current().place() / run.key)  # pytest-xdist sends it along
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
