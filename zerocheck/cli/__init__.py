"""Command line. Imports no torch before a command needs it, so that help comes at once.

- `checkpoint.py`: the command `zerocheck checkpoint`
- `compare.py`: the command `zerocheck compare`
- `faults.py`: the command `zerocheck faults`
- `journal.py`: shared part of the commands that write or read a journal
- `list.py`: the command `zerocheck list`: all names
- `memory.py`: the command `zerocheck memory`
- `options.py`: options that several commands have
- `output.py`: printing, with every character made printable
- `program.py`: failures of the command line: one line for people, and an exit code
- `python_run.py`: the command `zerocheck run` from Python: `zerocheck.run`
- `replay.py`: the command `zerocheck replay`
- `report.py`: the command `zerocheck report`
- `run.py`: the command `zerocheck run`
"""

from __future__ import annotations

import os

import click

from ..machine.host import prefer_huge_pages
from ..version import __version__
from .checkpoint import checkpoint
from .compare import compare
from .faults import faults
from .list import list_
from .memory import memory
from .program import Program
from .replay import replay
from .report import report
from .run import run


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zerocheck")
def main() -> None:
    """Check sharded training code step by step against single-device AdamW.

    \b
    zerocheck run                             all built-in implementations
    zerocheck run fsdp2 zero1 --profile ci    two of them, all pairs of features
    zerocheck run my_sharding.py:my_fsdp      your own code
    zerocheck run ds_config.json              a DeepSpeed config
    zerocheck run fsdp.yaml                   a config of accelerate, Lightning or a Trainer
    zerocheck replay zerocheck-report/findings/CASE.json

    A training run of your own is checked from within: `zerocheck.attach` in Python; `zerocheck
    compare` holds the same step of two runs against each other. Tests are made of all this by
    `zerocheck.parametrize_with_checks`.

    Exit codes: 0 all obligations hold; 1 a finding, or nothing was checked; 2 wrong usage;
    3 zerocheck itself failed, or ranks of a launcher were lost; 130 interrupted.
    """
    prefer_huge_pages(os.environ)


for _command in (run, replay, report, faults, checkpoint, compare, list_, memory):
    main.add_command(_command)
