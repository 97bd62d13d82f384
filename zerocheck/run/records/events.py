"""Delivery of records to handlers: the journal, the progress display, a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .records import Record


class Handler(Protocol):
    """Receiver of each record of a run, in order."""

    def handle(self, record: Record) -> None:
        """Take one record. An exception from here ends the run."""


class Bus:
    """Delivery of each record to every handler, in the order of the handlers.

    The journal is first, so that nothing is shown that is not written down.
    """

    def __init__(self, handlers: Iterable[Handler]) -> None:
        self._handlers = tuple(handlers)

    def handle(self, record: Record) -> None:
        """Deliver `record` to all handlers."""
        for handler in self._handlers:
            handler.handle(record)
