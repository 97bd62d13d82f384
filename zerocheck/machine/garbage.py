"""Garbage collection in processes that share pages with others, which stay frozen."""

from __future__ import annotations

import gc

_kept = False


def freeze() -> None:
    """Leave all objects of now to no collection of this process and of its children.

    A collection would copy the pages that they share. Garbage of imports is left where it is: to
    look for it takes 0.2 s, and it is less than 1 MiB.
    """
    global _kept
    gc.freeze()
    _kept = True


def is_frozen() -> bool:
    """Return True if objects are frozen.

    Counting goes through all of them, a million in a rank; a freeze by this module is remembered.
    """
    return _kept or gc.get_freeze_count() > 0
