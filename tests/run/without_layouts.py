"""The built-in implementations without a layout, as users' are: an attribute of each class name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from zerocheck.catalogue import NAMED

PLACES = {place.partition(":")[2]: place.partition(":")[0] for place in NAMED.values()}
"""Class -> module."""


def _no_layout(cls: Any, model: Any, case: Any, rank: int) -> None:
    return None


@cache
def __getattr__(name: str) -> Any:
    """A library that is an extra is imported where it is asked for."""
    if name not in PLACES:
        raise AttributeError(name)
    base = getattr(import_module(PLACES[name]), name)
    return type(name, (base,), {"layout": classmethod(_no_layout), "__module__": __name__})
