"""Checkpoints and data of a run: what is loaded was saved, and no sample comes twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..foreign_text import one_line
from ..protocol.verdicts import Violation
from .record.optimizers import group_options
from .record.ranks import AllRanks
from .saves.loaded import JudgedLoad, judge_load, judge_next_step
from .saves.samples import Followed, Samples
from .saves.saved_state import NextStep, TrainedModel, record_folder, state_of, write_saved
from .text import say

MOST_STEPS = 8
"""Steps that are checked after a load, at most, until enough samples were given to judge them."""


class Resume:
    """Saves and loads of a run, and the samples of the current epoch if they are followed."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained
        self._loaded = False
        self._followed = Followed()
        self._samples: Samples | None = None
        self._wanted = 0
        self._unwritten: list[tuple[Path, Callable[[Path], None]]] = []
        self._saved_in: Path | None = None
        self._loaded_from: Path | None = None

    def save(self, folder: Path, ranks: AllRanks, *, step: int, data: Any) -> Violation | None:
        """Write the record of a checkpoint, and judge the samples. Every rank calls this."""
        state = state_of(self._trained, ranks, step=step, data=data)
        found = self.judge_samples(ranks)
        if state is not None:
            self._unwritten.append((folder, partial(write_saved, state=state.saved)))
            if self._samples is not None:
                self._unwritten.append((folder, self._followed.writer()))
            self.write_waiting()
        self._saved_in = folder
        return found

    def load(
        self, folder: Path, ranks: AllRanks, *, options: bool, **named: Any
    ) -> JudgedLoad | None:
        """Judge a load, and go on from the samples of its checkpoint. Every rank calls this.

        options: compare those of parameter groups; named: for `judge_load`.
        """
        load = judge_load(folder, self._trained, ranks, options=options, **named)
        if load is None:
            return None
        self._loaded_from = folder if options and not load.judgement.violations else None
        self._loaded, self._wanted = True, MOST_STEPS
        if ranks.rank == 0:
            self._followed.read(record_folder(folder))
        return load

    def write_waiting(self) -> None:
        """Write the records of what exists; an asynchronous save makes it later."""
        waiting, self._unwritten = self._unwritten, []
        for checkpoint, write in waiting:
            if not checkpoint.exists():
                self._unwritten.append((checkpoint, write))
                continue
            try:
                folder = record_folder(checkpoint)
                folder.mkdir(exist_ok=True)
                write(folder)
            except OSError as error:
                say(one_line(f"zerocheck: what was saved is not recorded: {error}"))

    def write_last(self) -> None:
        """Write what is left at the end of the run, and say which checkpoints never existed."""
        self.write_waiting()
        for folder in dict.fromkeys(str(folder) for folder, _ in self._unwritten):
            say(one_line(f"zerocheck: no record of what was saved: {folder!r} never existed"))

    @property
    def compares_next_step(self) -> bool:
        """True if the next step is the first one after a save or a load."""
        return self._saved_in is not None or self._loaded_from is not None

    def next_step(self, step: int, ranks: AllRanks) -> Violation | None:
        """Record the options of a step after a save, and judge them after a load."""
        options = group_options(self._trained.optimizers)
        saved, loaded = self._saved_in, self._loaded_from
        self._saved_in = self._loaded_from = None
        if saved is not None and ranks.rank == 0:
            self._unwritten.append((saved, NextStep(step, options).write))
            self.write_waiting()
        return None if loaded is None else judge_next_step(loaded, options, ranks, step=step)

    def epoch(
        self, number: int, data_ranks: int | None, step: Callable[[], int], ranks: AllRanks
    ) -> None:
        """Follow the samples of an epoch. step: returns the number of the current step."""
        if type(number) is not int or number < 0:
            raise UsageError(f"epoch is {number!r} (allowed: an int from 0 on)")
        count = ranks.size if data_ranks is None else data_ranks
        if type(count) is not int or count < 1 or ranks.size % count:
            raise UsageError(f"data_ranks is {count!r} (allowed: what divides {ranks.size} ranks)")
        if self._samples is None:
            shared = ranks.size // count
            self._samples = Samples(self._trained.model, step, self._followed, shared)
        self._samples.epoch = number

    def judge_samples(self, ranks: AllRanks) -> Violation | None:
        """Judge the samples since the last time. Every rank calls this, in `attempt`."""
        if self._samples is None:
            return None
        found, judged = self._samples.exchange(ranks, loaded=self._loaded)
        self._wanted = 0 if judged else max(0, self._wanted - 1)
        return found

    @property
    def follows_samples(self) -> bool:
        """True after `epoch`, on all ranks."""
        return self._samples is not None

    @property
    def wants_next_step(self) -> bool:
        """True if the next step is to be checked, since a load is not judged by its samples yet."""
        return self._samples is not None and self._wanted > 0
