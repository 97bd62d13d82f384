"""`zerocheck compare`."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import UsageError, did_you_mean_path
from . import options as option
from .output import say


@click.command()
@click.argument("one", type=click.Path(path_type=Path), metavar="A")
@click.argument("other", type=click.Path(path_type=Path), metavar="B")
@click.option(
    "--model",
    metavar="NAME",
    help="The model before it is wrapped, path/to/file.py:factory. With it gradients are judged.",
)
@option.device("where the steps were taken")
def compare(one: Path, other: Path, model: str | None, device: str | None) -> int:
    """Compare the same step of two jobs: round-off, or a bug.

    A and B are bundles of zerocheck.attach, such as zerocheck-attach/recorder/step-1: of jobs on
    other numbers of ranks, with other sharding or kernels, that began the step with the same state
    and the same samples.

    Exits with 0 if both steps are right, 1 if one is wrong or they are not the same step, 2 for
    wrong usage.
    """
    from ..attached.bundle import is_bundle
    from ..attached.comparison import compare_bundles

    for path in (one, other):
        if not is_bundle(path):
            raise UsageError(
                f"{str(path)!r} is no bundle of zerocheck.attach{did_you_mean_path(path)} "
                "(allowed: a folder with a bundle.json)"
            )
    compared = compare_bundles(one, other, model, device)
    say(compared.text)
    return compared.exit_code
