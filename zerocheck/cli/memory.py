"""The command `zerocheck memory`. Imports no torch before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ..catalogue import RECOMMENDED
from ..errors import UsageError
from .options import INTEGER
from .output import ProgressLines, say, shown

PROGRESS_S = 10.0
"""Seconds between two lines of progress."""
_FILE = click.Path(dir_okay=False, path_type=Path)


def _option(name: str, metavar: str, default: int | str, words: str) -> Callable[[Any], Any]:
    """Return an option with a default that its help text shows."""
    kind = INTEGER if isinstance(default, int) else str
    return click.option(
        name, type=kind, metavar=metavar, default=default, show_default=True, help=words
    )


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@_option(
    "--implementation",
    "NAME",
    RECOMMENDED[3],
    "A built-in name, package.module:Name or path/to/file.py:Name.",
)
@_option("--world-size", "N", 8, "Number of ranks.")
@_option("--replicas", "R", 1, "Of HSDP: each is sharded over N / R ranks.")
@_option(
    "--tensor-parallel",
    "T",
    1,
    "Each layer is sharded over T ranks, which read the same samples, then over the others.",
)
@_option(
    "--expert-parallel",
    "E",
    1,
    "Ranks that the experts of each block are divided over; N / E ranks share each expert.",
)
@_option(
    "--pipeline-parallel",
    "P",
    1,
    "Pipeline stages of N / P ranks each, with the schedule 1F1B over --microbatches.",
)
@click.option(
    "--rank",
    type=INTEGER,
    metavar="R",
    help="Counted rank.  [default: 0, or the first of the pipeline stage that needs the most]",
)
@_option("--batch", "B", 1, "Samples of one microbatch of one rank.")
@_option("--sequence", "S", 1024, "Positions of each sample.")
@_option(
    "--precision",
    "NAME",
    "mixed",
    "mixed: compute in bf16, weights, gradients and states in fp32; or fp32.",
)
@click.option("--checkpoint-activations", is_flag=True, help="Run each block again in backward.")
@_option("--wrap", "NAME", "block", "Units of FSDP and ZeRO-3: block, layer or whole.")
@_option(
    "--optimizer",
    "NAME",
    "adamw",
    "adamw, with two moments; sgd, with a momentum buffer; muon, for the matrices in blocks, with "
    "adamw for all else; or another one of torch.",
)
@click.option(
    "--momentum", type=float, metavar="M", help="Of sgd; with 0 it keeps no state.  [default: 0.9]"
)
@click.option(
    "--reshard/--no-reshard",
    default=True,
    show_default=True,
    help="Units of FSDP2 and ZeRO-3 are released after the forward, or stay gathered.",
)
@_option(
    "--offload",
    "KIND",
    "none",
    "Shards with their gradients and states are in pinned or pageable memory of the host.",
)
@_option(
    "--microbatches", "M", 1, "Microbatches of --batch samples that are accumulated in a step."
)
@click.option(
    "--fit",
    is_flag=True,
    help="Search for what fits into --device-memory: the fewest ranks of each choice, by cost. "
    "--world-size is then the most ranks; of the other options, those that are given are kept.",
)
@click.option(
    "--link",
    metavar="SPEED",
    help="Of --fit, with --flops: what a rank sends in a second (400GB/s, 400Gbit/s), for step "
    "times on paper.",
)
@click.option("--flops", metavar="SPEED", help="Operations of a rank in a second: 400T.")
@click.option("--exact", is_flag=True, help="Simulate all blocks; nothing is extrapolated.")
@click.option(
    "--device-memory", metavar="SIZE", help="Say whether it fits, and what would: 80GiB, 40GB."
)
@click.option("--json", "json_file", metavar="FILE", type=_FILE, help="Write all of it as JSON.")
@click.option("--tables", is_flag=True, help="Print the tables of the ZeRO paper; without MODEL.")
@click.pass_context
def memory(
    context: click.Context,
    /,
    model: str | None,
    checkpoint_activations: bool,
    fit: bool,
    exact: bool,
    device_memory: str | None,
    link: str | None,
    flops: str | None,
    json_file: Path | None,
    tables: bool,
    **given: Any,
) -> int:
    """Simulate the memory of one rank.

    It needs no GPU and no other ranks: the implementation's own code takes two steps on tensors
    without data, in a process group that moves nothing.

    MODEL is a preset (gpt2, llama-70b, mixtral-8x7b, ...), the path of a Hugging Face config.json,
    package.module:factory or path/to/file.py:factory; the factory takes nothing and returns the
    model, which gets token ids of shape (B, S), or (model, batch) or (model, batch, loss), as for
    zerocheck run --model.

    With --fit the choices are searched: implementation, units, resharding, activation
    checkpointing, and microbatches into which --batch x --microbatches samples are divided.

    Exits with 0, 1 if it does not fit (with --fit: if nothing does) into --device-memory, 2 for
    wrong usage. What must fit is what torch's caching allocator reserves, next to the CUDA context;
    if that is not known, the report says so, and the peak must fit.
    """
    from ..memory.setup import Setup
    from ..sizes import parse_size

    if tables:
        if model is not None:
            raise UsageError(f"--tables takes no MODEL, got {model!r}")
        from ..memory.tables import render_tables

        say(render_tables(), nl=False)
        return 0
    if model is None:
        from ..memory.presets import PRESETS

        raise UsageError(
            f"MODEL is missing: {', '.join(PRESETS)}, config.json, package.module:factory or "
            "path/to/file.py:factory"
        )
    limit = None if device_memory is None else parse_size(device_memory)
    setup = Setup(model=model, checkpoint=checkpoint_activations, **given)
    setup.check()
    _check(setup)
    from ..memory.fixed import fixed_values, with_fixed

    setup = with_fixed(setup, named(context))
    if fit:
        if limit is None:
            raise UsageError("--fit needs --device-memory SIZE, such as 80GiB, to fit into")
        speeds = _speeds(link, flops)
        kept = named(context).union(fixed_values(setup))
        return _fit(setup, kept, limit, speeds, exact=exact, json_file=json_file)
    for option, value in (("--link", link), ("--flops", flops)):
        if value is not None:
            raise UsageError(f"{option} {value} is of --fit")
    return _simulate(setup, exact=exact, limit=limit, json_file=json_file)


def named(context: click.Context) -> frozenset[str]:
    """Return the names of the parameters that stand in the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return frozenset(
        name for name in context.params if context.get_parameter_source(name) is source
    )


def _speeds(link: str | None, flops: str | None) -> tuple[float, float] | None:
    from ..sizes import parse_operations, parse_rate

    if link is None and flops is None:
        return None
    if link is None or flops is None:
        missing = "--link, such as 400GB/s" if link is None else "--flops, such as 400T"
        raise UsageError(f"a step time on paper needs {missing}, too")
    return parse_rate(link), parse_operations(flops)


def _fit(
    setup: Any,
    given: frozenset[str],
    limit: int,
    speeds: tuple[float, float] | None,
    *,
    exact: bool,
    json_file: Path | None,
) -> int:
    from ..memory.fit.assemble import fit
    from ..memory.fit.choices import Restriction
    from ..memory.fit.result import Speeds
    from ..memory.fit.text import render_fit

    kept = {name.removesuffix("_activations") for name in given}
    names = kept & {field.name for field in fields(Restriction)}
    restriction = Restriction(**{name: getattr(setup, name) for name in names})
    report = fit(
        setup,
        limit,
        most_ranks=setup.world_size if "world_size" in given else None,
        restriction=restriction,
        exact=exact,
        speeds=None if speeds is None else Speeds(link=speeds[0], operations=speeds[1]),
        notify=ProgressLines(PROGRESS_S).notify,
    )
    return shown(report, render_fit(report), json_file)


def _simulate(setup: Any, *, exact: bool, limit: int | None, json_file: Path | None) -> int:
    from ..memory.analyse import analyse
    from ..memory.result import MemoryReport
    from ..memory.text import render, words_of_alternative

    def show(one: Any) -> None:
        text = (
            render(one).rstrip("\n") if isinstance(one, MemoryReport) else words_of_alternative(one)
        )
        say(text)

    notify = ProgressLines(PROGRESS_S).notify
    report = analyse(setup, exact=exact, limit=limit, notify=notify, show=show)
    return shown(report, "", json_file)


def _check(setup: Any) -> None:
    """Raise UsageError for an implementation that is not installed, or a lack of memory."""
    from ..catalogue import check_spelling, extra_of, missing
    from ..run.execute.machine import import_torch

    import_torch()
    check_spelling(setup.implementation)
    if (extra := extra_of(setup.implementation)) and (reason := missing(extra)):
        raise UsageError(f"{setup.implementation} {reason}")
