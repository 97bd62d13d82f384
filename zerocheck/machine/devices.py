"""Devices of cases: their names, and the random states that a forward can draw from.

A device is part of a run and not of a case, as the processor and the version of torch are: the case
says what is computed, and these decide its last bits. Imports torch only where a tensor is needed,
so that a wrong spelling is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import unknown

if TYPE_CHECKING:
    import torch

CPU, CUDA = "cpu", "cuda"
SPELLINGS = (CPU, CUDA, "cuda:0")


def check_device(given: str) -> None:
    """Raise UsageError for a device that cases do not run on.

    cuda: each rank has a GPU of its own where there are enough of them; cuda:N: all ranks of a host
    share that one.
    """
    if given not in (CPU, CUDA) and not re.fullmatch(r"cuda:(0|[1-9]\d{0,3})", given):
        raise unknown("device", given, SPELLINGS)


def kind_of(given: str) -> str:
    """ "cuda" of "cuda:1"."""
    return given.partition(":")[0]


def placed(kind: str) -> torch.device:
    """Return the device of this kind that this process uses: the current one."""
    import torch

    if kind == CPU:
        return torch.device(CPU)
    return torch.device(kind, torch.accelerator.current_device_index())


def random_state(device: torch.device) -> bytes:
    """Return the state of the generator that a forward on this device draws from.

    If that is not the CPU's, the state of the CPU's follows, from which user code may draw as well.
    """
    import torch

    ours: bytes = torch.get_rng_state().numpy().tobytes()
    if device.type == CPU:
        return ours
    return bytes(_module(device).get_rng_state(device).cpu().numpy().tobytes()) + ours


def set_random_state(state: bytes, device: torch.device) -> None:
    """Restore the state that `random_state` returned."""
    import torch

    of_device = drawn_from(state, device)
    if device.type != CPU:
        _module(device).set_rng_state(_bytes(of_device), device)
        of_device = state[len(of_device) :]
    torch.set_rng_state(_bytes(of_device))


def drawn_from(state: bytes, device: torch.device) -> bytes:
    """Return the device's own part of `random_state`: dropout draws from that."""
    import torch

    if device.type == CPU:
        return state
    return state[: len(state) - torch.get_rng_state().numel()]


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and this device alone, unlike `torch.manual_seed`."""
    import torch

    torch.default_generator.manual_seed(seed)
    if device.type != CPU:
        with _module(device).device(device):
            _module(device).manual_seed(seed)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of this device afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def processor(device: torch.device) -> str:
    """Describe the processor that determines the bits of kernels.

    Such as "NVIDIA H200 (9.0, 132 multiprocessors)"; empty for the CPU, which the environment of a
    run describes.
    """
    if device.type == CPU:
        return ""
    properties = _module(device).get_device_properties(device)
    version = f"{properties.major}.{properties.minor}"
    return f"{properties.name} ({version}, {properties.multi_processor_count} multiprocessors)"


def _module(device: torch.device) -> Any:
    """Return torch.cuda, for a device of that kind."""
    import torch

    return torch.get_device_module(device)


def _bytes(state: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


NO_MEMORY = (
    "{device} has no memory left. Each rank takes about 0.5 GiB of it for CUDA alone, in addition "
    "to what else runs there: fewer ranks (--world-sizes), or another device (--device)"
)


def out_of_memory(error: BaseException) -> bool:
    """Return True for torch's errors about exhausted memory of a GPU."""
    message = str(error)
    return isinstance(error, RuntimeError) and "CUDA" in message and "out of memory" in message
