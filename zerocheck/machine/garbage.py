"""Garbage collection in processes that share pages with others, which stay frozen."""

from __future__ import annotations

import gc

_kept = False


def freeze() -> None:
    """Collect, and leave all objects of now to no collection of this process and of its children.

    A collection would copy the pages that they share.
    """
    global _kept
    gc.collect()
    gc.freeze()
    _kept = True


def is_frozen() -> bool:
    """Return True if objects are frozen. They are counted, a million in a rank, by others alone."""
    return _kept or gc.get_freeze_count() > 0
