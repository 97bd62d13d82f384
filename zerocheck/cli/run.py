"""`zerocheck run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..machine.devices import CPU
from ..run.plan.settings import as_options, project_settings
from . import options as option
from .journal import start_run

if TYPE_CHECKING:
    from ..run.plan.options import RunOptions


@click.command()
@click.argument("implementations", metavar="[IMPLEMENTATION]...", nargs=-1)
@option.settings
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
@option.ranks
@option.timeout
@option.device("cpu")
@option.backend
@click.option(
    "--shard",
    metavar="K/N",
    help="Take this part of the cases, such as 3/8: other machines take the others, and --reuse "
    "puts them together.",
)
@click.option(
    "--reuse",
    metavar="JOURNAL",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The journal.ndjson of a shard, or of an interrupted run, of the same code, or a "
    "directory with such: its cases are not run again. May be given several times.",
)
@option.detail
def run(
    implementations: tuple[str, ...],
    features: tuple[str, ...],
    model: str | None,
    ranks: str | None,
    timeout: float,
    device: str | None,
    backend: str | None,
    shard: str | None,
    reuse: tuple[Path, ...],
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> int:
    """Check implementations of sharded training.

    IMPLEMENTATION is a built-in name, package.module:Name, path/to/file.py:Name, or the path of a
    config of DeepSpeed, accelerate, Lightning or transformers (TrainingArguments). Without one, all
    built-in ones are checked but those that need an extra, with few cases (--profile smoke);
    `zerocheck list` shows them. Options that are left out are those of [tool.zerocheck] in
    pyproject.toml.

    Exits with 0 if all obligations hold, 1 with findings or if nothing was checked, 2 for wrong
    usage.
    """
    from ..run.plan.options import choose_ranks

    detail = option.detail_of(quiet, verbose)
    options = run_options(
        implementations,
        option.given_settings(given),
        features=features,
        model=model,
        ranks=choose_ranks(ranks),
        timeout=timeout,
        device=device or CPU,
        backend=backend,
        shard=shard,
        reuse=reuse,
    )
    return start_run(options, detail=detail)


def run_options(
    implementations: Sequence[str], settings: Mapping[str, Any], *, shard: str | None, **fields: Any
) -> RunOptions:
    """Return the options of a run; what `settings` leaves out is that of the project.

    fields: further ones of RunOptions. Raises UsageError for what cannot be used, and for files
    and modules that do not exist.
    """
    from ..catalogue import BUILT_IN, innermost
    from ..run.plan.options import RunOptions
    from ..run.plan.profiles import FIRST_LOOK
    from ..run.plan.run_shard import RunShard
    from ..user_code import check_file

    merged = {**project_settings(Path.cwd()), **settings}
    if not implementations:
        merged.setdefault("profile", FIRST_LOOK)
    options = RunOptions(
        implementations=tuple(implementations) or tuple(BUILT_IN),
        shard=None if shard is None else RunShard.parse(shard),
        **fields,
        **as_options(merged),
    )
    own = (options.model, options.optimizer)
    for name in (*options.implementations, *(name for name in own if name and ":" in name)):
        check_file(innermost(name))
    return options
