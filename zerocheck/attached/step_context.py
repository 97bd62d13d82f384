"""Contexts of `check.step()`: of a step that is observed, and of one that is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol


class Observes(Protocol):
    """Observation of steps: its begin, its end, and an end without a verdict."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def abandon(self, error: BaseException | None = None) -> None: ...


NOTHING = nullcontext()
"""One context for all steps that are not observed."""


class ObservedStep(AbstractContextManager[None]):
    """Context of a step that is observed, and left unjudged where the script raises in it."""

    def __init__(self, observes: Observes) -> None:
        self._observes = observes

    def __enter__(self) -> None:
        self._observes.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._observes.end()
        else:
            self._observes.abandon(error)
