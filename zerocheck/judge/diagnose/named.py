"""Switch of the list of known causes: what attribution says by itself is seen without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NAMED = ContextVar("named", default=True)


def named() -> bool:
    """Return True if known causes are looked for."""
    return _NAMED.get()


def if_named(*causes: str) -> tuple[str, ...]:
    """Return these causes, or none where known causes are not looked for."""
    return causes if named() else ()


@contextmanager
def without_names() -> Iterator[None]:
    """Look for no known cause within the context."""
    token = _NAMED.set(False)
    try:
        yield
    finally:
        _NAMED.reset(token)
