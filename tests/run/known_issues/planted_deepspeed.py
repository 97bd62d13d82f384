"""A fault of DeepSpeed planted where the load of a universal checkpoint is a known issue."""

from __future__ import annotations

import torch.distributed as dist

from zerocheck.adapters.deepspeed.stage12 import DeepSpeed1
from zerocheck.contract import Loader


class CannotLoad(DeepSpeed1):
    """Three ranks can load no universal checkpoint, with the error of the known issue."""

    def load(self, directory: str, loader: Loader) -> None:
        if dist.get_world_size() == 3:
            raise IndexError("list index out of range")
        super().load(directory, loader)
