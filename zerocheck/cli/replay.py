"""`zerocheck replay`."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import click

from ..errors import UsageError, did_you_mean_path, few
from ..machine.devices import CPU, CUDA
from . import options as option
from .journal import start_replay
from .output import say


@click.command()
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
    "--optimizer",
    metavar="NAME",
    help="Your own optimizer, path/to/file.py:Class. Needed where the case was found with one.",
)
@click.option(
    "--script",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write a script that shows the fault with torch alone, and run nothing; - prints it.",
)
@option.ranks
@option.timeout
@option.device("where the case was found")
@option.backend
def replay(
    case: Path,
    implementation: str | None,
    model: str | None,
    optimizer: str | None,
    script: Path | None,
    ranks: str | None,
    timeout: float,
    device: str | None,
    backend: str | None,
) -> int:
    """Run one case again.

    CASE.json is one of the files in zerocheck-report/findings, or a bundle of zerocheck.attach. The
    report and the console print the whole command with each finding.

    Exits with 0 if the case holds now, 1 if it fails again, 2 for wrong usage.
    """
    from ..run.execute.machine import check_process_memory

    check_process_memory()  # before torch is imported
    from ..catalogue import check_factory, check_spelling
    from ..machine.devices import check_device
    from ..run.plan.options import check_backend, check_timeout, choose_ranks

    if implementation is not None:
        check_spelling(implementation)
    for kind, location in (("model", model), ("optimizer", optimizer)):
        if location is not None:
            check_factory(location, kind)
    chosen = choose_ranks(ranks)
    check_device(device or CPU)
    check_backend(backend, device or CUDA)
    check_timeout(timeout)
    if case.name == "bundle.json" or (case / "bundle.json").is_file():
        from ..attached.replay import replay as again

        attached = again(case, model, device)
        say(attached.text)
        return attached.exit_code
    if chosen == "processes" and not case.is_file():  # under torchrun rank 0 needs it, on its host
        raise UsageError(_no_case(case))
    if script is not None:
        return _write_script(case, implementation, script)
    own = model, optimizer
    from ..run.findings.case_file import read_for_replay

    given = {"implementation": implementation, "model": model, "optimizer": optimizer}
    read = cache(partial(read_for_replay, case, **given))
    return start_replay(
        read, implementation, own, kind=chosen, device=device, backend=backend, timeout=timeout
    )


def _write_script(case: Path, implementation: str | None, script: Path) -> int:
    from ..run.findings.case_file import not_without_asking, read
    from ..script import script_of, write_script

    file = read(case)
    if implementation is None:
        not_without_asking(case, file.implementation)
    text = script_of(file, implementation=implementation)
    if str(script) == "-":
        say(text, nl=False)
        return 0
    write_script(script, text)
    say(f"{script}: {len(text.splitlines())} lines; it exits with 1 while the fault is there")
    return 0


def _no_case(given: Path) -> str:
    """Say that there is no such case file; of a directory, which ones are in it."""
    if not given.is_dir():
        from ..run.records.previous_runs import kept_case

        kept = kept_case(given)
        moved = kept and f"; a later run moved it: zerocheck replay {kept}"
        return f"there is no file {str(given)!r}{moved or did_you_mean_path(given)}"
    cases = sorted(str(one) for one in (*given.glob("*.json"), *given.glob("findings/*.json")))
    cases = [one for one in cases if Path(one).name not in ("report.json", "against.json")]
    shown = few(cases, 3) or "there is none in it"
    return f"{str(given)!r} is a directory; replay takes a file: {shown}"
