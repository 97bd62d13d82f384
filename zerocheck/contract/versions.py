"""Numbered checkpoints in one directory, so that a killed writer leaves the previous one.

torch's dcp writes over the files of an older checkpoint; its `.metadata`, which comes last, says
that one is whole. Each checkpoint gets a folder of its own, named by a number that counts up.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

WHOLE = ".metadata"


def fresh(directory: str) -> str:
    """Return a folder for the next checkpoint, the same on every rank; every rank calls this.

    What is older than the newest whole checkpoint is removed first.
    """
    chosen = [""]
    if dist.get_rank() == 0:
        numbers = _numbers(directory)
        whole = [number for number in numbers if _is_whole(directory, number)]
        for number in numbers:
            if number not in whole[-1:]:
                shutil.rmtree(Path(directory) / str(number), ignore_errors=True)
        chosen = [str(Path(directory) / str(max(numbers, default=0) + 1))]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def newest(directory: str) -> str:
    """Return the folder of the newest whole checkpoint; the directory itself if there is none."""
    whole = [number for number in _numbers(directory) if _is_whole(directory, number)]
    return str(Path(directory) / str(whole[-1])) if whole else directory


def _numbers(directory: str) -> list[int]:
    """Return the numbers of the folders in a directory, in ascending order."""
    path = Path(directory)
    if not path.is_dir():
        return []
    return sorted(int(one.name) for one in path.iterdir() if one.is_dir() and one.name.isdigit())


def _is_whole(directory: str, number: int) -> bool:
    path = Path(directory) / str(number) / WHOLE
    return path.is_file() and path.stat().st_size > 0
