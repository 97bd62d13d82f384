"""`zerocheck faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..machine.devices import CPU
from . import options as option
from .journal import start_faults
from .list import list_faults


@click.command()
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
@option.world_sizes
@option.seed
@click.option("--max-cases", type=option.INTEGER, metavar="N", help="Cases per fault at most.")
@click.option(
    "--shrink", is_flag=True, help="Look for the smallest case of each fault, at the end."
)
@click.option(
    "--without-names",
    is_flag=True,
    help="Look for no known cause: show what attribution says of each fault by itself.",
)
@option.obligations("equivalence,resume,memory")
@option.report_dir
@option.device("cpu")
@option.backend
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
    obligation catches it.

    Exits with 0 if all are caught, 1 if one escapes, 2 for wrong usage.
    """
    from ..run.plan.options import parse_obligations
    from ..run.plan.settings import parse_world_sizes

    if listed:
        return list_faults()
    from ..kill_matrix.options import MatrixOptions

    options = MatrixOptions(
        names=names,
        world_sizes=parse_world_sizes(world_sizes) if world_sizes is not None else (),
        obligations=parse_obligations(obligations),
        report_dir=report_dir,
        device=device or CPU,
        **given,
    )
    return start_faults(options)
