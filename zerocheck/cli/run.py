"""`zerocheck run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..machine.devices import CPU
from ..run.plan.settings import as_options, project_settings
from . import options as option
from .journal import note_configs, start_run


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
@option.history
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
    history: Path | None,
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
    from ..catalogue import BUILT_IN, innermost
    from ..run.plan.options import RunOptions, choose_ranks
    from ..run.plan.profiles import FIRST_LOOK
    from ..run.plan.run_shard import RunShard
    from ..user_code import check_file

    detail = option.detail_of(quiet, verbose)
    settings = {**project_settings(Path.cwd()), **option.given_settings(given)}
    if not implementations:
        settings.setdefault("profile", FIRST_LOOK)
    options = RunOptions(
        implementations=implementations or tuple(BUILT_IN),
        features=features,
        model=model,
        ranks=choose_ranks(ranks),
        timeout=timeout,
        device=device or CPU,
        backend=backend,
        shard=None if shard is None else RunShard.parse(shard),
        reuse=reuse,
        **as_options(settings),
    )
    own = [one for one in (options.model, options.optimizer) if one is not None and ":" in one]
    for name in (*options.implementations, *own):
        check_file(innermost(name))
    note_configs(options.implementations)
    return start_run(options, detail=detail, history=history)
