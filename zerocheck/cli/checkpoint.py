"""The command `zerocheck checkpoint`. Imports no torch before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .output import shown

if TYPE_CHECKING:
    from ..attached.saves.relations import Names

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("directory", metavar="DIR", type=_PATH)
@click.argument("other", metavar="[OTHER]", type=_PATH, required=False)
@click.option(
    "--against",
    metavar="PATH",
    type=_PATH,
    help="Compare the weights in DIR, an export, with those that were trained: a checkpoint, or a "
    "folder that check.saved or check.published wrote into.",
)
@click.option(
    "--name",
    "names",
    metavar="HERE=TRAINED",
    multiple=True,
    help="With --against: names in DIR, and in training. Several, separated by commas, are joined "
    "along dim 0; * is one part of a name, ** several; .T behind the names: transposed. Repeat it.",
)
@click.option("--part", is_flag=True, help="With --against: DIR has a part of the weights.")
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything that was found there too, as JSON.",
)
def checkpoint(
    directory: Path,
    other: Path | None,
    against: Path | None,
    names: tuple[str, ...],
    part: bool,
    json_file: Path | None,
) -> int:
    """Examine a checkpoint that you have, or compare two.

    DIR is a checkpoint of torch.distributed.checkpoint, transformers, accelerate, DeepSpeed, or
    Lightning, or has files of torch.save or safetensors; a single file works, too. One checkpoint
    is checked for files, tiling, checksums, values that are not finite, second moments, steps, and
    first moments, and compared with its record if check.saved wrote one. Two may differ in format
    and sharding, and are equal if every tensor is, bit for bit.

    Nothing in a checkpoint is executed. A pickle that needs more than tensors, numbers, and
    containers is rejected with the name of what it needs.

    Exits with 0 if nothing is wrong or both are equal, 1 with findings, 2 for wrong usage.
    """
    from ..run.execute.machine import import_torch

    import_torch()
    from ..attached.saves.in_files import examined
    from ..attached.saves.published import report_of
    from ..checkpoint.compare import compare
    from ..checkpoint.text import render

    if against is not None and other is not None:
        raise click.UsageError("--against takes the place of OTHER: give one of them")
    if against is None and (names or part):
        raise click.UsageError("--name and --part need --against")
    if against is not None:
        report = report_of(directory, against, _names(names), partial=part)
    elif other is not None:
        report = compare(directory, other)
    else:
        report = examined(directory)
    return shown(report, render(report), json_file)


def _names(texts: tuple[str, ...]) -> Names:
    pairs: dict[str | tuple[str, ...], str | Sequence[str]] = {}
    for text in texts:
        here, separator, trained = text.partition("=")
        if not (here and separator and trained):
            raise click.UsageError(f"--name {text!r} has not the form HERE=TRAINED")
        pairs[(*here.split(","),)] = (*trained.split(","),)
    return pairs
