"""`zerocheck report`."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError
from . import options as option
from .journal import journal_in, report_matrix, report_releases, report_run


@click.command()
@click.argument(
    "journals", type=click.Path(path_type=Path), metavar="JOURNAL...", nargs=-1, required=True
)
@click.option(
    "--report-dir",
    metavar="DIR",
    type=option.DIRECTORY,
    help="Where the reports are written.  [default: next to the journal]",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="OLD",
    help="An earlier run to compare with: a journal, a report.json, or their directory.",
)
@click.option(
    "--matrix",
    is_flag=True,
    help="One page, releases.md, of several runs, each with another release of a library.",
)
@option.detail
def report(
    journals: tuple[Path, ...],
    report_dir: Path | None,
    against: Path | None,
    matrix: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Write the reports of a journal again, and exit as its run did.

    JOURNAL is a journal.ndjson or, of a kill matrix, a faults.ndjson; or its directory.

    A journal without its end, of a run that was interrupted or killed, gives a report of what it
    holds, and exit code 130.

    With --against: what is newly violated, fixed, newly unsupported or not exercised since an
    earlier run, with another torch for example, and what moved. Exits with 1 only if something is
    newly violated, or an obligation is no longer checked.

    With --matrix: implementation by release, with verdicts and cost, and fault by release. Runs of
    the same cases, with the known issues of all releases, say most.
    """
    from ..run.records.journal import is_matrix

    detail = option.detail_of(quiet, verbose)
    found = [journal_in(one) for one in journals]
    if matrix:
        if against is not None:
            raise UsageError("--against compares two runs, and --matrix any number of them")
        return report_releases(found, report_dir or Path("zerocheck-report"))
    if len(found) > 1:
        raise UsageError(
            "report takes one journal; of several releases --matrix makes one page, and "
            "`zerocheck run --reuse` puts the shards of a run together"
        )
    (journal,) = found
    directory = report_dir or journal.parent
    if is_matrix(journal):
        if against is not None:
            raise UsageError("--against compares runs; this is the journal of a kill matrix")
        return report_matrix(journal, directory)
    return report_run(journal, directory, against, detail=detail)
