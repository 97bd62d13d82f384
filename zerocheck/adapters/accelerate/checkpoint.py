"""Checkpoints of `Accelerator.save_state`, numbered in one directory."""

from __future__ import annotations

from accelerate import Accelerator

from ...contract.implementation import Loader
from ..shared.whole_folder import newest_whole, write_whole


def save(accelerator: Accelerator, directory: str, loader: Loader) -> None:
    """Save the whole training state, with the position in the data; every rank calls this."""
    accelerator._custom_objects[:] = [loader]
    write_whole(directory, accelerator.save_state)


def load(accelerator: Accelerator, directory: str, loader: Loader) -> None:
    """Load the newest whole training state. Raises FileNotFoundError, on every rank, for none."""
    accelerator._custom_objects[:] = [loader]
    accelerator.load_state(newest_whole(directory))
