"""Steps between the checked ones, kept by the flight recorder where one is asked for."""

from __future__ import annotations

from pathlib import Path

from ..contract.semantics import Semantics
from ..foreign_text import one_line
from .record.ranks import AllRanks, Stopped, attempt
from .recorder import FlightRecorder, open_recorder
from .text import say
from .watching.watch import Watch


class RecordedSteps:
    """Recorder of this rank, which may be off. recorder: None before `open`, or where it is off.

    limit: bytes, None for no recorder. Where it fails, that is printed, and it is off.
    """

    def __init__(self, limit: int | None, directory: Path, semantics: Semantics) -> None:
        self._limit, self._directory, self._semantics = limit, directory, semantics
        self.recorder: FlightRecorder | None = None

    @property
    def wanted(self) -> bool:
        """Return True if steps are kept, or are to be."""
        return self._limit is not None

    def open(self, ranks: AllRanks) -> None:
        """Open the recorder, if one is wanted. Every rank calls this."""
        limit = self._limit
        if limit is None:
            return
        try:
            self.recorder = attempt(
                ranks, lambda: open_recorder(self._directory, limit, self._semantics, ranks)
            )
        except Stopped as stopped:
            self._give_up(str(stopped))

    def keep(self, watch: Watch) -> None:
        """Keep a step that is not checked, on this rank alone, without communication."""
        try:
            if self.recorder is not None:
                self.recorder.keep(watch.observed())
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            watch.stop()

    def forget(self) -> None:
        """Drop the steps that are kept, since a checked one was judged."""
        if self.recorder is not None:
            self.recorder.forget()

    def stop(self) -> None:
        """Keep no more."""
        self._limit = self.recorder = None

    def _give_up(self, why: str) -> None:
        self.stop()
        say(one_line(f"zerocheck: steps between the checked ones are not recorded: {why}"))
