"""The command `zerocheck checkpoint`. Imports no torch before it runs."""

from __future__ import annotations

from pathlib import Path

import click

from .output import shown

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("directory", metavar="DIR", type=_PATH)
@click.argument("other", metavar="[OTHER]", type=_PATH, required=False)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything that was found there too, as JSON.",
)
def checkpoint(directory: Path, other: Path | None, json_file: Path | None) -> int:
    """Examine a checkpoint that you have, or compare two.

    DIR is a directory of torch.distributed.checkpoint, or holds files of torch.save or
    safetensors; a single file of whole tensors is taken too. One is checked for files, tiling,
    checksums, values that are not finite, second moments, steps and first moments; two may differ
    in format and sharding, and are equal if every tensor is, bit for bit.

    Nothing of a checkpoint is executed: a pickle that asks for more than tensors, numbers,
    containers and torch's own records is refused, with the name it asks for.

    Exits with 0 if nothing is wrong or both are equal, 1 with findings, 2 for wrong usage.
    """
    from ..run.execute.machine import import_torch

    import_torch()
    from ..checkpoint.compare import compare
    from ..checkpoint.examine import examine
    from ..checkpoint.text import render

    report = examine(directory) if other is None else compare(directory, other)
    return shown(report, render(report), json_file)
