"""Options that several commands have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UsageError
from ..run.plan.settings import SETTINGS

if TYPE_CHECKING:
    from ..report.progress import Detail

F = TypeVar("F", bound=Callable[..., Any])


class _Directory(click.Path):
    """Directory, which an empty text does not name: it would be the current one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("an empty text names no directory; . is the current one", param, ctx)
        return super().convert(value, param, ctx)


class _Integer(click.types.IntParamType):
    """Integer in ASCII digits; `int` takes those of every script, and underscores."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        return int(value)


DIRECTORY = _Directory(file_okay=False, path_type=Path)
INTEGER = _Integer()
report_dir = click.option(
    "--report-dir",
    metavar="DIR",
    type=DIRECTORY,
    default=Path("zerocheck-report"),
    show_default=True,
    help="Where the journal, the reports and the cases to replay are written.",
)
world_sizes = click.option(
    "--world-sizes", metavar="1,2,3", help="Numbers of ranks.  [default: the profile's]"
)
seed = click.option(
    "--seed",
    type=INTEGER,
    metavar="N",
    default=0,
    show_default=True,
    help="What cases are drawn from: another number, other cases.",
)


def obligations(default: str) -> Callable[[F], F]:
    """Return the option, with the default named in its help."""
    return click.option(
        "--obligations",
        metavar="NAMES",
        default=default,
        show_default=True,
        help="What to check, with commas between: equivalence (every step), resume (checkpoints), "
        "memory (bytes and collectives), or single ones.",
    )


def settings(command: F) -> F:
    """Add the options of SETTINGS to a command; those that are not given are None, or empty."""
    for setting in reversed(SETTINGS.values()):
        kind: dict[str, Any] = {"metavar": setting.metavar}
        names = [f"--{setting.option}"]
        match setting.kind:
            case "whole number":
                kind |= {"type": INTEGER}
            case "folder":
                kind |= {"type": DIRECTORY}
            case "files":
                kind |= {"multiple": True}
            case "switch":
                names, kind = [f"--{setting.option}/--no-{setting.option}"], {"default": None}
        command = click.option(*names, help=setting.description, **kind)(command)
    return command


def given_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given on the command line."""
    return {
        name: SETTINGS[name].of_text(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value not in (None, ())
    }


ranks = click.option(
    "--ranks",
    metavar="KIND",
    help="processes: started here; torchrun: given by the launcher.  [default: torchrun "
    "where its environment is there, else processes]",
)
timeout = click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="torchrun: how long a collective may wait before its ranks count as hung.",
)


def device(default: str) -> Callable[[F], F]:
    """Return the option, with the default named in its help."""
    return click.option(
        "--device",
        metavar="NAME",
        help="cpu, cuda (a GPU for each rank where there are enough, else ranks share them), or "
        f"cuda:N.  [default: {default}]",
    )


def detail(command: F) -> F:
    """Add the options of how much is printed; the command gets `quiet` and `verbose`."""
    quiet = click.option("-q", "--quiet", is_flag=True, help="Findings and the verdict alone.")
    verbose = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        help="Known issues in full, as they show; else one line for each fault, at the end.",
    )
    return quiet(verbose(command))


def detail_of(quiet: bool, verbose: bool) -> Detail:
    """Return how much is printed. Raises UsageError for both options at once."""
    if quiet and verbose:
        raise UsageError("--quiet and --verbose are opposites; give one of them")
    return "quiet" if quiet else "verbose" if verbose else "normal"


backend = click.option(
    "--backend",
    metavar="NAME",
    help="Of the process group on GPUs: nccl or gloo.  [default: nccl where each rank has a GPU of "
    "its own]",
)
