"""torch only: a damaged checkpoint of torch.distributed.checkpoint is loaded without a word.

    python dcp_loads_a_damaged_checkpoint.py

Two ranks save two tensors, full of 1 at first and of 2 later. Then a bit is flipped in a file; a
file is replaced by that of the first checkpoint; and a rank is killed while the first checkpoint is
overwritten by the second. What is loaded is neither.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2

warnings.simplefilter("ignore")


class Killed(dcp.FileSystemWriter):
    """Rank 1 is killed when rank 0 has written its file."""

    def write_data(self, *given: Any) -> Any:
        done = super().write_data(*given) if dist.get_rank() == 0 else None
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def run(rank: int, folder: str, name: str, value: float, killed: bool) -> None:
    rendezvous = f"{folder}/rendezvous-{name}-{value}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    states = {"a": torch.full((4,), value), "b": torch.full((4,), value)}
    directory = f"{folder}/{name}"
    dcp.save(states, storage_writer=(Killed if killed else dcp.FileSystemWriter)(directory))
    dist.destroy_process_group()


def save(folder: str, name: str, value: float, *, killed: bool = False) -> Path:
    try:
        arguments = (folder, name, value, killed)
        mp.start_processes(run, args=arguments, nprocs=WORLD_SIZE, start_method="fork")
    except Exception:
        if not killed:
            raise
    return Path(folder, name)


def load(directory: Path) -> list[list[float]]:
    states = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(states, checkpoint_id=directory, no_dist=True)
    return [states[name].tolist() for name in ("a", "b")]


def show(what: str, directory: Path, expected: str, right: list[float]) -> bool:
    """Whether what is loaded is wrong."""
    try:
        got: Any = load(directory)
    except Exception as error:
        got = f"{type(error).__name__}"
        wrong = False
    else:
        wrong = got not in ([[value] * 4, [value] * 4] for value in right)
    print(f"{what}: expected {expected}, got {got}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        flipped = save(folder, "flipped", 2.0)
        two = b"\0\0\0\x40"  # as fp32
        data = (flipped / "__0_0.distcp").read_bytes()
        (flipped / "__0_0.distcp").write_bytes(data.replace(two * 4, two * 3 + b"\0\0\0\x42"))
        wrong = show("a bit flipped", flipped, "an error", [])

        old, mixed = save(folder, "old", 1.0), save(folder, "mixed", 2.0)
        shutil.copy(old / "__1_0.distcp", mixed / "__1_0.distcp")
        wrong |= show("a file of another checkpoint", mixed, "an error", [])

        save(folder, "over", 1.0)
        over = save(folder, "over", 2.0, killed=True)
        wrong |= show("killed while overwriting", over, "all 1 or all 2", [1.0, 2.0])
        sys.exit(1 if wrong else 0)
