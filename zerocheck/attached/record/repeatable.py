"""Check whether a model gives the same outputs for the same inputs and random states.

Where it does not, its reference says nothing about the gradient of a run: it drew other numbers,
from a generator of the model, or went on from another state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.distributed.tensor import DTensor

from ...compat_compiler import use_deterministic

Digest = tuple[int, ...]


def digest(tensors: Iterable[torch.Tensor]) -> Digest:
    """Return one word for each tensor, of all its bits; others have another, but by accident.

    Of a DTensor, of the local one. Of tensors that are none of torch's own (nested, quantized),
    nothing is said.
    """
    locals_ = (one._local_tensor if isinstance(one, DTensor) else one for one in tensors)
    return tuple(_word(one.detach()) for one in locals_ if one.numel())


def _word(tensor: torch.Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError, TypeError):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return int(torch.hash_tensor(real).view(torch.int64))
    return 0


def repeats(call: Callable[[], Digest], first: Digest, kind: str) -> bool:
    """Return False if a call that gave `first` gives something else now. kind: of the device.

    Kernels of a CPU add in the same order each time. Some of others do not; so where bits differ,
    they are compared once more with torch's deterministic kernels, and nothing is said where it has
    none.
    """
    if call() == first:
        return True
    if kind == "cpu":
        return False
    with warnings.catch_warnings(record=True) as given, _deterministic():
        warnings.simplefilter("always")
        same = call() == call()
    return same or any(_no_kernel(str(one.message)) for one in given)


def _no_kernel(message: str) -> bool:
    """Return True for a warning that an operation has no deterministic kernel.

    The one on CuBLAS is on several streams at once, which a reference does not use.
    """
    return "deterministic" in message and "CuBLAS" not in message


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    use_deterministic(True, warn_only=warns or not before)
    try:
        yield
    finally:
        use_deterministic(before, warn_only=warns)
