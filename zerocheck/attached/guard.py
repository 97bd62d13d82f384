"""Replace functions for a step, and keep errors of the observation out of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ErrorGuard:
    """First error of the code that observes a step, kept out of the training."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Record an exception of the block and go on after it."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace owner.name by make(original) within the context. owner: an object, or a cell."""
    original = getattr(owner, name)
    own = vars(owner).get(name) if hasattr(owner, "__dict__") else original
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
