"""Keep errors of the observation out of the training that is observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
