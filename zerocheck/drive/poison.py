"""Filling of uninitialised memory with NaN, so that reading it is detected."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_original: Callable[..., Any] = torch.UntypedStorage.resize_


@contextmanager
def poison_memory() -> Iterator[None]:
    """Fill `torch.empty` and growing storages with NaN in the context (all bits set; integers: -1).

    torch fills what `empty` hands out itself while deterministic algorithms are asked for; what
    `UntypedStorage.resize_` hands out, which FSDP uses, is filled here.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.UntypedStorage.resize_ = _resize_and_fill  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = _original  # type: ignore[method-assign]
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def _resize_and_fill(storage: torch.UntypedStorage, size: int) -> Any:
    held = storage.nbytes()
    result = _original(storage, size)
    if size > held:
        if storage.device.type == "cpu":
            ctypes.memset(storage.data_ptr() + held, 0xFF, size - held)
        else:
            # On the current stream, on which whoever asked for the memory is to write it.
            grown = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            grown[held:].fill_(0xFF)
    return result
