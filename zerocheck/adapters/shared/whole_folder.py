"""Checkpoints of trainers that write no mark of a whole one: folders, numbered in one directory.

Users of such a library take a new folder for each checkpoint, and so does this: the last file of a
folder, written when all ranks are done, is the mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ...contract.versions import WHOLE, fresh, newest


def write_whole(directory: str, write: Callable[[str], object]) -> None:
    """Have a new folder written, and mark it as whole; every rank calls this."""
    place = fresh(directory)
    write(place)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(place) / WHOLE).write_text("whole")
    dist.barrier()


def newest_whole(directory: str) -> str:
    """Return the newest folder that is whole. Raises FileNotFoundError, on every rank, for none."""
    place = newest(directory)
    if place == directory:
        raise FileNotFoundError(f"no whole checkpoint in {directory}")
    return place
