"""Shared part of the commands that write or read a journal: run, judge, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExitCode, UsageError, did_you_mean_path
from ..foreign_text import copyable, printable
from ..machine import launcher, signals
from ..machine.devices import CPU
from .output import annotate, remark, say

if TYPE_CHECKING:
    from rich.console import Console

    from ..kill_matrix.options import MatrixOptions
    from ..report.comparison import ComparedReport
    from ..report.progress import Detail
    from ..run.execute.rank_pool import RankPool
    from ..run.plan.options import RunOptions
    from ..run.records.records import CaseFile
    from ..run.records.tally import Tally

SECONDS_OF_A_LOOK = 5
"""Time of an implementation in the profile `smoke`: measured for all nine, and rounded up."""

CROWD = 8
"""Ranks on one processor from which on a run says beforehand how long a case takes."""
RANK_SECONDS = 0.15
"""Seconds of a processor for each rank of a case, the judge's share included: measured for FSDP2 on
16, 32 and 64 ranks and two processors, where a case took 1.1, 2.4 and 5.5 s."""


def start_run(options: RunOptions, *, detail: Detail = "normal") -> int:
    """Run, judge, and write the reports; return the exit code. Under torchrun rank 0 writes."""
    note_configs(options.implementations)
    if options.ranks != "torchrun":
        _check_machine(options.world_sizes)
        _note_sharing(options.device, options.world_sizes)
        return _run_recorded(options, None, detail=detail)
    from ..run.execute.launch import with_ranks_of

    # The other ranks are let go when the reports are written: see machine/launcher.py.
    return with_ranks_of(options, lambda opened: _run_recorded(options, opened, detail=detail))


def _run_recorded(options: RunOptions, ranks: RankPool | None, *, detail: Detail) -> int:
    from ..report.progress import ProgressDisplay

    def start(*handlers: Any) -> int:
        from ..run.execute.launch import with_ranks_of

        def judge(opened: RankPool) -> int:
            with signals.deferred():  # torch ends the process if its import is interrupted
                from ..run import engine

            note_untested()
            return engine.run(options, handlers, ranks=opened)

        return with_ranks_of(options, judge) if ranks is None else judge(ranks)

    if detail != "quiet" and launcher.is_rank_0():
        _announce(options)

    code = _recorded(
        options.report_dir / "journal.ndjson",
        ProgressDisplay(detail=detail),
        start,
        _write_run,
        continued_by="--reuse",
    )
    launcher.report_exit(
        code, f"zerocheck ends with exit code {code}: see {options.report_dir}/report.md"
    )
    return code


def start_replay(
    read: Callable[[], CaseFile],
    implementation: str | None,
    own: tuple[str | None, str | None],
    *,
    kind: str = "processes",
    device: str | None = None,
    backend: str | None = None,
    timeout: float = 60.0,
) -> int:
    """Replay a case on ranks of this kind, print the result; return the exit code.

    read: reads the case file, on rank 0 alone; own: as for `show_replay`; device: None for that on
    which the case was found.
    """
    from ..run.execute.launch import device_for, with_ranks

    most_ranks = 1
    if kind == "processes":
        file = read()
        most_ranks, device = file.case.world_size, device or device_for(file.environment.device)
    return with_ranks(
        kind,
        lambda opened: show_replay(read(), implementation, own, opened),
        most_ranks=most_ranks,
        device=device or CPU,
        backend=backend,
        timeout_s=timeout,
    )


def show_replay(
    file: CaseFile, implementation: str | None, own: tuple[str | None, str | None], ranks: RankPool
) -> int:
    """Replay a case, print the result; return the exit code.

    own: the user's model and optimizer, as they are named.
    """
    note_untested()
    from rich.text import Text

    from ..report.console import new_console
    from ..report.progress import print_finding
    from ..run import replay as replaying

    replayed = replaying.replay(
        file, implementation=implementation, model=own[0], optimizer=own[1], ranks=ranks
    )
    console = new_console()
    for failure in replayed.findings:
        print_finding(console, failure)
    console.print(Text(replayed.verdict))
    launcher.report_exit(replayed.exit_code, printable(replayed.verdict))
    return replayed.exit_code


def _recorded(
    path: Path,
    progress: Any,
    start: Callable[..., int],
    write: Callable[[Path], Path],
    *,
    continued_by: str = "",
) -> int:
    """Run with a journal and progress as handlers; `write` makes the reports of the journal.

    continued_by: the option that takes the journal of an interrupted run, if there is one.
    """
    from ..run.records.journal import Journal

    journal = Journal(path)
    try:
        _check_outputs(path)
        code = start(journal, progress)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    finally:
        signals.ignore()
        # Also where the harness failed: what was found so far stays readable.
        progress.close()
        journal.close()
        if journal.begun:
            say(f"report: {write(path)}")
    if code == ExitCode.INTERRUPTED:
        remark("interrupted")
        if continued_by and journal.begun:
            named = copyable([str(path)])
            remark(f"the same command with {continued_by} {named} goes on from here")
    return code


def _check_outputs(journal: Path) -> None:
    """Raise UsageError for a user's files with the names of reports.

    Only in a directory where there was no run before.
    """
    if journal.exists() or {one.name for one in journal.parent.iterdir()} <= {
        f"{journal.name}.new"
    }:
        return
    from ..report.write import FORMATS, MATRIX_FORMATS
    from ..run.records.previous_runs import check_outputs

    check_outputs(journal.parent, (*FORMATS, *MATRIX_FORMATS))


def note_untested() -> None:
    """Note a torch version that zerocheck is not tested with; only rank 0 of a launch prints it."""
    from ..run.execute.environment import untested_versions

    if untested_versions() and launcher.is_rank_0():
        note(untested_versions())


def _announce(options: RunOptions) -> None:
    """Say how long a first look takes, or a case of many ranks, before anything is imported."""
    from ..machine.host import processors
    from ..run.plan.profiles import FIRST_LOOK

    ranks, cores = max(options.world_sizes), processors()
    if options.ranks == "processes" and options.device == CPU and ranks > CROWD * cores:
        remark(
            f"{ranks} ranks share {cores} processor{'s'[: cores != 1]}: a case takes about "
            f"{ranks * RANK_SECONDS / cores:.0f} s (--max-cases limits their number)"
        )
    count = len(options.implementations)
    if options.profile == FIRST_LOOK:
        remark(
            f"a first look at {count} implementation{'s'[: count != 1]}: about "
            f"{count * SECONDS_OF_A_LOOK} s on two idle cores (--profile quick tries more)"
        )


def note_configs(names: Sequence[str]) -> None:
    """Print a run's notes on the configs of libraries; only rank 0 of a launch does."""
    from ..catalogue import config_notes

    for text in config_notes(names) if launcher.is_rank_0() else ():
        note(text)


def _check_machine(world_sizes: Sequence[int]) -> None:
    """Check the machine before torch is imported, which fails in many ways for want of memory."""
    from ..run.execute.machine import check_machine

    check_machine(max(world_sizes))


def _note_sharing(device: str, world_sizes: Sequence[int]) -> None:
    """Note that ranks share GPUs, if they do. Raises UsageError for a device that is not there."""
    if device == CPU:
        return
    from ..run.execute.launch import sharing_note

    text = sharing_note(device, max(world_sizes))
    if text:
        note(text)


def _write_run(journal: Path) -> Path:
    from ..report import github
    from ..report.write import write_reports
    from ..run.records.journal import read
    from ..run.records.tally import tally

    records = read(journal, note=note)
    write_reports(records, journal.parent)
    if github.listening():
        github.publish(tally(records), annotate)
    return journal.parent / "report.html"


def journal_in(given: Path) -> Path:
    """Return the given journal, or that of a run or of a kill matrix in the directory.

    Raises UsageError, with what to give, if it is not there.
    """
    if given.is_dir():
        names = ("journal.ndjson", "faults.ndjson")
        found = next((given / name for name in names if (given / name).is_file()), None)
        if found is not None:
            return found
    elif given.exists():
        return given
    near = "" if given.is_dir() else did_you_mean_path(given)
    place = f"in {str(given)!r}" if given.is_dir() else str(given)
    wanted = "give a journal.ndjson, or the directory in which a run wrote its report"
    raise UsageError(f"there is no journal {place}{f'{near} Or' if near else ';'} {wanted}")


def report_run(
    journal: Path, directory: Path, against: Path | None, *, detail: Detail = "normal"
) -> int:
    """Write the reports of a journal again; return the exit code of its run.

    With `against`, that of the comparison with an earlier run.
    """
    from ..report.comparison import read_report
    from ..report.console import new_console
    from ..report.progress import print_findings, print_outcome
    from ..report.write import write_reports
    from ..run.records.journal import read
    from ..run.records.tally import run_exit_code, tally

    records = read(journal, note=note)
    counted = tally(records)
    console = new_console()
    if against is None:
        print_findings(console, counted, detail=detail)
        print_outcome(console, counted, detail=detail)
        code = run_exit_code(counted)
        write_reports(records, directory)
    else:
        earlier = read_report(against)  # which may be refused before anything is written
        write_reports(records, directory)
        code = _compare(console, counted, directory, earlier)
    say(f"report: {directory / 'report.html'}")
    return code


def report_releases(journals: Sequence[Path], directory: Path) -> int:
    """Write one page of several runs, each with another release; return the exit code."""
    from ..report.releases import FILE, page
    from ..report.write import write_texts
    from ..run.records.journal import is_matrix, read
    from ..run.records.previous_runs import check_outputs

    for path in journals:
        if is_matrix(path):
            raise UsageError(f"{path} is of a kill matrix; --matrix takes the journals of runs")
    check_outputs(directory, (FILE,))
    (written,) = write_texts(directory, {FILE: page([read(path, note=note) for path in journals])})
    say(f"report: {written}")
    return ExitCode.HOLDS


def _compare(console: Console, counted: Tally, directory: Path, earlier: ComparedReport) -> int:
    from ..report import comparison_text, github
    from ..report.comparison import compare, report_of
    from ..report.progress import print_finding
    from ..report.write import write_changes

    changes = compare(report_of(counted), earlier)
    new = {row.now for row in changes.newly_violated}
    for finding in counted.findings:
        if finding.fingerprint in new:
            print_finding(console, finding)
    comparison_text.print_changes(console, changes)
    write_changes(counted, changes, directory)
    if github.listening():
        with suppress(OSError):  # it stands in against.md too
            github.summarize(comparison_text.markdown(changes))
    say(f"comparison: {directory / 'against.md'}")
    return changes.exit_code


def note(text: str) -> None:
    """Print a note apart from the result."""
    remark(f"note: {text}")


def start_faults(options: MatrixOptions) -> int:
    """Hunt the planted faults and write the kill matrix; the exit code."""
    world_sizes = options.run(options.faults[0]).world_sizes
    _check_machine(world_sizes)
    from ..report.faults_progress import FaultsProgress
    from ..run.execute.launch import with_ranks_of

    def start(*handlers: Any) -> int:
        def hunt(opened: RankPool) -> int:
            from ..kill_matrix import engine

            note_untested()
            return engine.run(options, handlers, ranks=opened)

        return with_ranks_of(options.run(options.faults[0]), hunt)

    _note_sharing(options.device, world_sizes)
    return _recorded(options.report_dir / "faults.ndjson", FaultsProgress(), start, _write_faults)


def _write_faults(journal: Path) -> Path:
    from ..report.write import write_matrix
    from ..run.records.journal import read_matrix

    write_matrix(read_matrix(journal, note=note), journal.parent)
    return journal.parent / "faults.md"


def report_matrix(journal: Path, directory: Path) -> int:
    """Write the kill matrix of a journal again; the exit code of its run."""
    from ..report.faults_progress import FaultsProgress
    from ..report.write import write_matrix
    from ..run.records.journal import read_matrix
    from ..run.records.matrix_summary import Summary

    records = read_matrix(journal, note=note)
    summary = Summary(records)
    FaultsProgress().show(summary)
    write_matrix(records, directory)
    say(f"report: {directory / 'faults.md'}")
    return summary.exit_code
