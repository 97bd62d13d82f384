"""Single-file checkpoints, which rank 0 writes with torch.save and every rank reads.

The file holds `model` and `optimizer`, and beside them `loader`, `scaler` (if losses are scaled)
and `rng`: the random state of every rank, by its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...contract.checkpoint import OtherStates

FILE = "checkpoint.pt"


def write(directory: str, held: Mapping[str, Any], states: OtherStates) -> None:
    """Write the checkpoint; every rank calls this with its `contract.checkpoint.beside`.

    The new file takes the place of an older one when it is whole. Raises RuntimeError on every
    rank if rank 0 cannot write.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, states["rng"])
    answer: list[str | None] = [None]
    if dist.get_rank() == 0:
        rng = {name: state for one in gathered for name, state in one.items()}
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            part = Path(directory, f"{FILE}.part")
            torch.save({**held, **states, "rng": rng}, part)
            os.replace(part, Path(directory, FILE))
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(answer)
    if answer[0] is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint: {answer[0]}")


def read(directory: str) -> dict[str, Any]:
    """Read the file onto the CPU; without `rng` if another number of ranks wrote it."""
    found: dict[str, Any] = torch.load(Path(directory, FILE), map_location="cpu", weights_only=True)
    if len(found["rng"]) != dist.get_world_size():
        del found["rng"]
    return found


def by_name(state_dict: Mapping[str, Any], names: list[str]) -> dict[str, Mapping[str, Any]]:
    """Map parameter names to the states of an optimizer's state dict, in their order."""
    return {names[number]: state for number, state in state_dict["state"].items()}
