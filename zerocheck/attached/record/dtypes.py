"""Dtypes by their names, as records and bundles have them."""

from __future__ import annotations

import torch


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name, such as "torch.float32"."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
