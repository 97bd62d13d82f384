"""Device of a rank, and the settings before it starts that make runs repeatable."""

from __future__ import annotations

import os

import torch

from zerocheck.errors import UsageError
from zerocheck.execution.kernels import set_exact
from zerocheck.machine.devices import CPU, NO_MEMORY, kind_of, out_of_memory

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")
"""What cuBLAS promises the same bits with, by its reference manual ("Results Reproducibility")."""

GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"
SHARED = "cpu:gloo,cuda:gloo"
"""gloo for tensors of the GPU too, spelled out: for a default group of "gloo" alone torch's device
mesh makes another one of nccl, which refuses ranks that share a GPU."""


def check_there(device: str) -> None:
    """Raise UsageError if this machine has no such device. Sets what has to be set before cuBLAS
    starts, in this process and in those that it starts. Does nothing for the cpu.

    It asks the driver for the number of devices; the zygote, which ranks are forked from, does not.
    """
    if device == CPU:
        return
    given = os.environ.setdefault(_WORKSPACE, _REPEATABLE[0])
    if given not in _REPEATABLE:
        raise UsageError(
            f"{_WORKSPACE} is {given!r}, with which runs cannot be repeated (allowed: "
            f"{', '.join(_REPEATABLE)}, or not set)"
        )
    there = torch.cuda.device_count()
    if not there:
        why = f"torch {torch.__version__} sees none"
        if torch.version.cuda is None:
            why = f"torch {torch.__version__} is built without CUDA"
        elif "CUDA_VISIBLE_DEVICES" in os.environ:
            why += f" (CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r})"
        raise UsageError(f"--device {device}: there is no CUDA device here, {why} (allowed: cpu)")
    number = numbered(device)
    if number is not None and number >= there:
        allowed = ", ".join(["cpu", "cuda", *(f"cuda:{one}" for one in range(there))])
        raise UsageError(
            f"--device {device}: this machine has {there} CUDA device{'s' * (there > 1)} "
            f"(allowed: {allowed})"
        )


def numbered(device: str) -> int | None:
    """1 of "cuda:1", None of "cuda"."""
    number = device.partition(":")[2]
    return int(number) if number else None


def shares(device: str, ranks: int) -> bool:
    """Return True if so many ranks on this host share GPUs."""
    if device == CPU:
        return False
    return ranks > (1 if numbered(device) is not None else torch.cuda.device_count())


def backend_of(device: str, *, shared: bool, asked: str | None = None) -> str:
    """The backend of the process group: nccl on GPUs, but gloo where ranks share one, which nccl
    refuses. asked: gloo or nccl, None for what fits.

    Raises UsageError for nccl where it cannot be.
    """
    if device == CPU:
        return GLOO
    if asked == "nccl" and shared:
        raise UsageError("nccl refuses ranks that share a GPU: fewer ranks, or gloo")
    return SHARED if shared or asked == "gloo" else NCCL


def prepare(device: str, local_rank: int) -> torch.device:
    """Take the device of this rank, and set what decides the bits of its kernels; returns it.

    On `cuda` it is the GPU of the rank's number on its host, or, where there are fewer, of the
    number modulo theirs. Raises UsageError as `check_there`, and for a GPU without memory.
    """
    if device == CPU:
        return torch.device(CPU)
    check_there(device)
    given = numbered(device)
    number = local_rank % torch.cuda.device_count() if given is None else given
    try:
        torch.cuda.set_device(number)
    except RuntimeError as error:
        if out_of_memory(error):
            raise UsageError(NO_MEMORY.format(device=f"{kind_of(device)}:{number}")) from error
        raise
    placed = torch.device(kind_of(device), number)
    set_exact(placed)
    return placed
