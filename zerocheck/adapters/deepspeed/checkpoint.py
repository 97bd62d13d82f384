"""Checkpoints of a DeepSpeedEngine: native ones, for a fixed number of ranks, and universal ones.

`client_state` holds `loader`, and `rng`: the random state of every rank, by its number. Files are
pickles, which `torch.load` executes: only those that ranks of the same case wrote are read.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist

from ...contract import Loader
from ...contract.checkpoint import other_states, take_over
from ...errors import CheckpointError
from .library import Engine, ds_to_universal, silent


def save(engine: Engine, directory: str, loader: Loader) -> None:
    """`engine.save_checkpoint`, under the tag that it gives. Every rank calls this."""
    states = other_states(loader, None)
    gathered: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, states["rng"])
    states["rng"] = {name: state for one in gathered for name, state in one.items()}
    engine.save_checkpoint(directory, client_state=states)


def load(engine: Engine, directory: str, loader: Loader) -> None:
    """`engine.load_checkpoint` of the last one; it is converted first if it is to be universal.

    Raises CheckpointError where there is none, of which DeepSpeed only warns.
    """
    if engine.load_universal_checkpoint():
        _convert(directory)
    path, states = engine.load_checkpoint(directory)
    if path is None:
        raise CheckpointError(f"DeepSpeed found no checkpoint in {directory}")
    if len(states["rng"]) != dist.get_world_size():
        del states["rng"]
    take_over(states, loader, None)


def _convert(directory: str) -> None:
    """`ds_to_universal`, on rank 0, beside the checkpoint. Raises CheckpointError on every rank."""
    answer: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            tag = Path(directory, "latest").read_text().strip()
            target = Path(directory, f"{tag}_universal")
            shutil.rmtree(target, ignore_errors=True)
            options = Namespace(
                input_folder=str(Path(directory, tag)),
                output_folder=str(target),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # it is missing without Megatron
            )
            with silent():
                ds_to_universal.main(options)
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(answer)
    if answer[0] is not None:
        raise CheckpointError(f"ds_to_universal failed: {answer[0]}")
