"""The command `zerocheck memory`. Imports no torch before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..catalogue import RECOMMENDED
from ..errors import UsageError
from .output import say, shown

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option(
    "--implementation",
    metavar="NAME",
    default=RECOMMENDED[3],
    show_default=True,
    help="A built-in name, package.module:Name or path/to/file.py:Name.",
)
@click.option(
    "--world-size", type=int, metavar="N", default=8, show_default=True, help="Number of ranks."
)
@click.option(
    "--rank", type=int, metavar="R", default=0, show_default=True, help="The rank that is counted."
)
@click.option(
    "--batch",
    type=int,
    metavar="B",
    default=1,
    show_default=True,
    help="Samples of one microbatch of one rank.",
)
@click.option(
    "--sequence",
    type=int,
    metavar="S",
    default=1024,
    show_default=True,
    help="Positions of each sample.",
)
@click.option(
    "--precision",
    metavar="NAME",
    default="mixed",
    show_default=True,
    help="mixed: compute in bf16, weights, gradients and states in fp32; or fp32.",
)
@click.option("--checkpoint-activations", is_flag=True, help="Run each block again in backward.")
@click.option(
    "--wrap",
    metavar="NAME",
    default="block",
    show_default=True,
    help="Units of FSDP and ZeRO-3: block, layer or whole.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    default="adamw",
    show_default=True,
    help="adamw, with two moments; sgd, with a momentum buffer; muon, for the matrices in blocks, "
    "with adamw for all else; or another one of torch.",
)
@click.option(
    "--momentum",
    type=float,
    metavar="M",
    help="Of sgd; with 0 it keeps no state.  [default: 0.9]",
)
@click.option("--exact", is_flag=True, help="Simulate all blocks; nothing is extrapolated.")
@click.option(
    "--device-memory", metavar="SIZE", help="Say whether it fits, and what would: 80GiB, 40GB."
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write all of it as JSON.")
@click.option("--tables", is_flag=True, help="Print the tables of the ZeRO paper; without MODEL.")
@click.option(
    "--peaks",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Measure the peak over wrapping, prefetching and buckets, on ranks of this machine, and "
    "write peak.md and peak.svg; without MODEL.",
)
def memory(
    model: str | None,
    checkpoint_activations: bool,
    exact: bool,
    device_memory: str | None,
    json_file: Path | None,
    tables: bool,
    peaks: Path | None,
    **given: Any,
) -> int:
    """Simulate the memory of one rank.

    It needs no GPU and no other ranks: the implementation's own code takes two steps on tensors
    without data, in a process group that moves nothing.

    MODEL is a preset (gpt2, gpt3-175b, llama-70b, ...), package.module:factory or
    path/to/file.py:factory; the factory takes nothing and returns the model, which gets token ids
    of shape (B, S).

    Exits with 0, 1 if it does not fit into --device-memory, 2 for wrong usage.
    """
    from ..memory.setup import Setup
    from ..sizes import parse_size

    if tables:
        if model is not None:
            raise UsageError(f"--tables takes no MODEL, got {model!r}")
        from ..memory.tables import render_tables

        say(render_tables(), nl=False)
        return 0
    if peaks is not None:
        if model is not None:
            raise UsageError(f"--peaks takes no MODEL, got {model!r}")
        return _peaks(peaks)
    if model is None:
        from ..memory.presets import PRESETS

        raise UsageError(
            f"MODEL is missing: {', '.join(PRESETS)}, package.module:factory or "
            "path/to/file.py:factory"
        )
    limit = None if device_memory is None else parse_size(device_memory)
    setup = Setup(model=model, checkpoint=checkpoint_activations, **given)
    setup.check()
    return _simulate(setup, exact=exact, limit=limit, json_file=json_file)


def _peaks(directory: Path) -> int:
    from ..report.peaks import markdown, picture
    from ..report.write import write_texts
    from ..run.peaks import buckets, pool, stages, windows

    with pool() as ranks:
        of_windows, of_buckets = list(windows(ranks)), list(buckets(ranks))
        page = markdown(of_windows, of_buckets, list(stages(ranks)))
    texts = {"peak.md": page, "peak.svg": picture(of_windows, of_buckets)}
    for path in write_texts(directory, texts):
        say(path)
    return 0


def _simulate(setup: Any, *, exact: bool, limit: int | None, json_file: Path | None) -> int:
    from ..catalogue import check_spelling, extra_of
    from ..run.execute.machine import check_process_memory

    check_process_memory()  # before torch is imported
    from ..memory.analyse import analyse
    from ..memory.text import render

    check_spelling(setup.implementation)
    if extra := extra_of(setup.implementation):
        raise UsageError(
            f"{setup.implementation} cannot be simulated: {extra} needs tensors with data; "
            f"what its ranks hold is measured with: zerocheck run {setup.implementation} "
            "--obligations memory"
        )
    report = analyse(setup, exact=exact, limit=limit)
    return shown(report, render(report), json_file)
