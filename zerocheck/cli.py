"""The command line. Imports no torch before a command needs it, so that help comes at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from . import __version__
from .cli_checkpoint import checkpoint
from .cli_errors import Program
from .cli_journal import (
    journal_in,
    note_untested,
    report_matrix,
    report_run,
    show_replay,
    start_faults,
    start_run,
)
from .cli_list import list_, list_faults
from .cli_memory import memory
from .devices import CPU, CUDA
from .errors import UsageError
from .run.settings import SETTINGS, as_options, project_settings

F = TypeVar("F", bound=Callable[..., Any])

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_report_dir = click.option(
    "--report-dir",
    metavar="DIR",
    type=_DIRECTORY,
    default=Path("zerocheck-report"),
    show_default=True,
    help="Where the journal, the reports and the cases to replay are written.",
)
_world_sizes = click.option(
    "--world-sizes", metavar="1,2,3", help="Numbers of ranks.  [default: the profile's]"
)
_seed = click.option(
    "--seed",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="What cases are drawn from: another number, other cases.",
)


def _obligations(default: str) -> Callable[[F], F]:
    """The option, with what is checked if it is not given."""
    return click.option(
        "--obligations",
        metavar="NAMES",
        default=default,
        show_default=True,
        help="What to check, with commas between: equivalence (every step), resume (checkpoints), "
        "memory (bytes and collectives), or single ones.",
    )


def _settings(command: F) -> F:
    """The options of SETTINGS; those that are not given are None, or empty."""
    for setting in reversed(SETTINGS.values()):
        kind: dict[str, Any] = {"metavar": setting.metavar}
        names = [f"--{setting.option}"]
        match setting.kind:
            case "whole number":
                kind |= {"type": int}
            case "folder":
                kind |= {"type": _DIRECTORY}
            case "files":
                kind |= {"multiple": True}
            case "switch":
                names, kind = [f"--{setting.option}/--no-{setting.option}"], {"default": None}
        command = click.option(*names, help=setting.description, **kind)(command)
    return command


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that stand on the command line."""
    return {
        name: SETTINGS[name].of_text(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value not in (None, ())
    }


_ranks = click.option(
    "--ranks",
    metavar="KIND",
    help="processes: started here; torchrun: given by the launcher.  [default: torchrun "
    "where its environment is there, else processes]",
)
_timeout = click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="torchrun: how long a collective may wait before its ranks count as hung.",
)


def _device(default: str) -> Callable[[F], F]:
    """The option, with where ranks are if it is not given."""
    return click.option(
        "--device",
        metavar="NAME",
        help="cpu, cuda (a GPU for each rank where there are enough, else ranks share them), or "
        f"cuda:N.  [default: {default}]",
    )


_backend = click.option(
    "--backend",
    metavar="NAME",
    help="Of the process group on GPUs: nccl or gloo.  [default: nccl where each rank has a GPU of "
    "its own]",
)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zerocheck")
def main() -> None:
    """Check sharded training code step by step against single-device AdamW.

    Exit codes: 0 all obligations hold; 1 a finding, or nothing was checked; 2 wrong usage;
    3 zerocheck itself failed, or ranks of a launcher were lost; 130 interrupted.
    """


@main.command()
@click.argument("implementations", metavar="[IMPLEMENTATION]...", nargs=-1)
@_settings
@click.option(
    "--model",
    metavar="NAME",
    help="Your own model in every case: path/to/file.py:factory, a function that returns (model, "
    "batch) or (model, batch, loss).",
)
@click.option(
    "--feature",
    "features",
    metavar="NAME",
    multiple=True,
    help="Only cases that have this feature. May be given several times.",
)
@_ranks
@_timeout
@_device("cpu")
@_backend
def run(
    implementations: tuple[str, ...],
    features: tuple[str, ...],
    model: str | None,
    ranks: str | None,
    timeout: float,
    device: str | None,
    backend: str | None,
    **given: Any,
) -> int:
    """Check implementations of sharded training.

    IMPLEMENTATION is a built-in name, package.module:Name or path/to/file.py:Name. Without one, all
    built-in ones are checked but those that need an extra; `zerocheck list` shows them. Options
    that are left out are those of [tool.zerocheck] in pyproject.toml.

    Exits with 0 if all obligations hold, 1 with findings or if nothing was checked, 2 for wrong
    usage.
    """
    from .catalogue import BUILT_IN, family
    from .importing import check_file
    from .run.options import RunOptions, choose_ranks

    settings = {**project_settings(Path.cwd()), **_given(given)}
    options = RunOptions(
        implementations=implementations or tuple(BUILT_IN),
        features=features,
        model=model,
        ranks=choose_ranks(ranks),
        timeout=timeout,
        device=device or CPU,
        backend=backend,
        **as_options(settings),
    )
    for name in (*options.implementations, *filter(None, [options.model])):
        check_file(family(name)[-1])
    return start_run(options)


@main.command()
@click.argument("case", type=click.Path(path_type=Path), metavar="CASE.json")
@click.option(
    "--implementation",
    metavar="NAME",
    help="Run the case on this implementation. Needed where the case was found in code of yours: a "
    "case file alone starts none.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Your own model, path/to/file.py:factory. Needed where the case was found with one.",
)
@click.option(
    "--script",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write a script that shows the fault with torch alone, and run nothing; - prints it.",
)
@_ranks
@_timeout
@_device("where the case was found")
@_backend
def replay(
    case: Path,
    implementation: str | None,
    model: str | None,
    script: Path | None,
    ranks: str | None,
    timeout: float,
    device: str | None,
    backend: str | None,
) -> int:
    """Run one case again.

    CASE.json is one of the files in zerocheck-report/findings, or a bundle of zerocheck.attach. The
    report and the console print the whole command beside each finding.

    Exits with 0 if the case holds now, 1 if it fails again, 2 for wrong usage.
    """
    from .catalogue import check_factory, check_spelling
    from .devices import check_device
    from .run.options import check_backend, check_timeout, choose_ranks

    if implementation is not None:
        check_spelling(implementation)
    if model is not None:
        check_factory(model)
    kind = choose_ranks(ranks)
    check_device(device or CPU)
    check_backend(backend, device or CUDA)
    check_timeout(timeout)
    if case.name == "bundle.json" or (case / "bundle.json").is_file():
        from .attached.replay import replay as again
        from .report.text import printable

        attached = again(case, model, device)
        click.echo(printable(attached.text))
        return attached.exit_code
    if kind == "processes" and not case.is_file():  # under torchrun rank 0 needs it, on its host
        raise UsageError(f"there is no file {str(case)!r}")
    if script is not None:
        return _write_script(case, implementation, script)
    note_untested()
    if kind == "processes":
        return show_replay(case, implementation, model, None, device=device, backend=backend)
    from .run.launch import with_ranks

    return with_ranks(
        kind,
        lambda opened: show_replay(case, implementation, model, opened),
        device=device or CPU,
        backend=backend,
        timeout_s=timeout,
    )


def _write_script(case: Path, implementation: str | None, script: Path) -> int:
    from .run.casefile import read
    from .run.replay import not_without_asking
    from .script import script_of, write_script

    file = read(case)
    if implementation is None:
        not_without_asking(case, file.implementation)
    text = script_of(file, implementation=implementation)
    if str(script) == "-":
        click.echo(text, nl=False)
        return 0
    write_script(script, text)
    click.echo(
        f"{script}: {len(text.splitlines())} lines; it exits with 1 while the fault is there"
    )
    return 0


@main.command()
@click.argument("journal", type=click.Path(path_type=Path), metavar="JOURNAL")
@click.option(
    "--report-dir",
    metavar="DIR",
    type=_DIRECTORY,
    help="Where the reports are written.  [default: beside the journal]",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="OLD",
    help="An earlier run to compare with: a journal, a report.json, or their directory.",
)
def report(journal: Path, report_dir: Path | None, against: Path | None) -> int:
    """Write the reports of a journal again, and exit as its run did.

    JOURNAL is a journal.ndjson or, of a kill matrix, a faults.ndjson; or the directory that it lies
    in.

    A journal without its end, of a run that was interrupted or killed, gives a report of what it
    holds, and exit code 130.

    With --against: what is newly violated, fixed, newly unsupported or not exercised since an
    earlier run, with another torch for example, and what moved. Exits with 1 only if something is
    newly violated, or an obligation is no longer checked.
    """
    from .run.journal import is_matrix

    journal = journal_in(journal)
    directory = report_dir or journal.parent
    if is_matrix(journal):
        if against is not None:
            raise UsageError("--against compares runs; this is the journal of a kill matrix")
        return report_matrix(journal, directory)
    return report_run(journal, directory, against)


@main.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Show all faults, and run nothing.")
@click.option(
    "--implementation",
    metavar="NAME",
    help="Inject faults into this one, your own for example, and not into the built-in ones.",
)
@click.option(
    "--profile",
    metavar="NAME",
    default="ci",
    show_default=True,
    help="Which cases are to catch them: quick, ci (all pairs of features) or thorough.",
)
@_world_sizes
@_seed
@click.option("--max-cases", type=int, metavar="N", help="Cases per fault at most.")
@click.option(
    "--shrink", is_flag=True, help="Look for the smallest case of each fault, at the end."
)
@_obligations("equivalence,resume,memory")
@_report_dir
@_device("cpu")
@_backend
def faults(
    names: tuple[str, ...],
    listed: bool,
    world_sizes: str | None,
    obligations: str,
    report_dir: Path,
    device: str | None,
    **given: Any,
) -> int:
    """Show that known bugs are caught: the kill matrix.

    NAME is a planted fault, as --list shows them; without one, all are run, each until an
    obligation catches it. Beside them stand the checks that tests usually have: a loss curve, and
    assert_close on the parameters.

    Exits with 0 if all are caught, 1 if one escapes, 2 for wrong usage.
    """
    from .run.options import parse_obligations, parse_world_sizes

    if listed:
        return list_faults()
    from .run.matrix.options import MatrixOptions

    options = MatrixOptions(
        names=names,
        world_sizes=parse_world_sizes(world_sizes) if world_sizes is not None else (),
        obligations=parse_obligations(obligations),
        report_dir=report_dir,
        device=device or CPU,
        **given,
    )
    return start_faults(options)


main.add_command(checkpoint)
main.add_command(list_)
main.add_command(memory)

if __name__ == "__main__":
    sys.exit(main())
