"""Checkpoints of `Accelerator.save_state`, numbered in one directory.

accelerate writes no file that says that a checkpoint is whole. Its users take a new folder for
each, and so does this: the last file of a folder, written when all ranks are done, is the mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator

from ...contract.implementation import Loader
from ...contract.versions import WHOLE, fresh, newest


def save(accelerator: Accelerator, directory: str, loader: Loader) -> None:
    """Save the whole training state, with the position in the data; every rank calls this."""
    accelerator._custom_objects[:] = [loader]
    write_whole(directory, accelerator.save_state)


def load(accelerator: Accelerator, directory: str, loader: Loader) -> None:
    """Load the newest whole training state. Raises FileNotFoundError, on every rank, for none."""
    accelerator._custom_objects[:] = [loader]
    accelerator.load_state(newest_whole(directory))


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
