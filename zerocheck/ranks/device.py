"""What a rank needs before its accelerator starts, so that runs can be repeated."""

from __future__ import annotations

import os

import torch

from zerocheck.errors import UsageError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")
"""What cuBLAS promises the same bits with, by its reference manual ("Results Reproducibility")."""


def prepare(device: str) -> None:
    """Take the GPU of this rank's number on its host; no TF32, no choice of kernels by their time.

    Does nothing for the cpu. Raises UsageError if the host has fewer GPUs than ranks, or if
    CUBLAS_WORKSPACE_CONFIG is set to something that gives other bits in each run.
    """
    if not device.startswith("cuda"):
        return
    given = os.environ.setdefault(_WORKSPACE, _REPEATABLE[0])  # read when cuBLAS starts
    if given not in _REPEATABLE:
        raise UsageError(
            f"{_WORKSPACE} is {given!r}, with which runs cannot be repeated (allowed: "
            f"{', '.join(_REPEATABLE)}, or not set)"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise UsageError(
            f"local rank {number} has no GPU, this host has {there}: start at most {there} ranks "
            "on it (--nproc-per-node)"
        )
    torch.cuda.set_device(number)
