"""Outcomes of cases that other runs have judged: shards, or a run that was interrupted."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...case.schema import Case
from ...catalogue import innermost, is_config
from ...errors import UsageError
from ..plan.options import RunOptions
from ..plan.run_shard import RunShard
from ..records.journal import read
from ..records.previous_runs import EARLIER
from ..records.records import CaseFinished, Environment, Outcome, RunStarted
from .outcome import Results

_FIELDS = Outcome.__struct_fields__
_SAME = ("zerocheck", "torch", "device", "gpu", "cuda", "libraries")
"""Fields of the environment that decide a verdict, or the bits of kernels on a GPU."""


def sources_of(options: RunOptions) -> dict[str, str]:
    """Return a digest of each file of the user's that a run names.

    Files of code, and configs. What these import is not looked at, nor are names of modules.
    """
    named = (*map(innermost, options.implementations), options.model, options.optimizer)
    places = {one for one in named if one is not None}
    files = {one if is_config(one) else one.rpartition(":")[0] for one in places}
    return {
        file: hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
        for file in sorted(files)
        if file and Path(file).is_file()
    }


class ReusedOutcomes:
    """Outcomes by implementation and case, from the journals that `--reuse` names.

    sources: see `sources_of`; missing: shards of which there is no journal, where there are some of
    others. A case that fresh rank processes judged otherwise than its own is run again: its journal
    has one of the outcomes.
    """

    def __init__(self, options: RunOptions, environment: Environment) -> None:
        """Read them. Raises UsageError for a file that is no journal, or of another kind of run."""
        self.sources = sources_of(options)
        self._outcomes: dict[tuple[str, Case], Outcome] = {}
        shards = set()
        for path in (one for given in options.reuse for one in _journals(given)):
            started, *records = read(path, summed=True)
            assert isinstance(started, RunStarted)
            self._check_same(path, started, options, environment)
            if started.shard:
                shards.add(RunShard.parse(started.shard))
            for record in records:
                if isinstance(record, CaseFinished) and not record.unreproduced:
                    fields = {name: getattr(record, name) for name in _FIELDS}
                    self._outcomes[record.implementation, record.case] = Outcome(**fields)
        counts = sorted({shard.count for shard in shards})
        if len(counts) > 1:
            raise UsageError(
                f"--reuse: the journals are of {' and of '.join(map(str, counts))} shards; "
                "give those of one run"
            )
        every = [RunShard(number, count) for count in counts for number in range(1, count + 1)]
        self.missing = tuple(str(shard) for shard in every if shard not in shards)

    def of(self, implementation: str, case: Case) -> Outcome | None:
        """Return the outcome of a case, if a journal has it."""
        return self._outcomes.get((implementation, case))

    def _check_same(
        self, path: Path, started: RunStarted, options: RunOptions, environment: Environment
    ) -> None:
        """Raise UsageError for a journal whose outcomes this run would not have."""
        for name in _SAME:
            was, now = getattr(started.environment, name), getattr(environment, name)
            if was != now:
                was, now = was or "none", now or "none"
                raise UsageError(f"--reuse {path}: {name} was {was}; here it is {now}")
        if started.obligations != options.obligations:
            was, now = ", ".join(started.obligations), ", ".join(options.obligations)
            raise UsageError(f"--reuse {path}: it judged {was}; this run judges {now}")
        changed = [
            file
            for file, digest in started.sources.items()
            if self.sources.get(file, digest) != digest
        ]
        if changed:
            raise UsageError(
                f"--reuse {path}: {changed[0]} is not what it was; run its cases again"
            )


def _journals(given: Path) -> list[Path]:
    """Return the journal that is meant, or all below a directory, but for those of earlier runs."""
    if not given.is_dir():
        return [given]
    found = [
        path
        for path in sorted(given.rglob("journal.ndjson"))
        if EARLIER not in path.relative_to(given).parts
    ]
    if not found:
        raise UsageError(f"--reuse {given}: no journal.ndjson is in this directory, or below it")
    return found


class ReusedTrial:
    """Trial of a case that was judged already, in place of a `Trial`."""

    def __init__(self, implementation: str, case: Case, outcome: Outcome) -> None:
        self.implementation = implementation
        self.case = case
        self._outcome = outcome

    single = True
    """Other trials may be submitted before `result`, as for a `Trial` of one job."""

    def result(self) -> Results:
        """Return no results: no ranks run."""
        return Results(())

    def judged(self, results: Results, *, words: bool) -> Outcome:
        """Return the outcome; it was judged by other semantics too."""
        return self._outcome
