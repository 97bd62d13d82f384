"""Run one case again, as a case file names it, in fresh rank processes."""

from __future__ import annotations

from pathlib import Path

from ..catalogue import is_built_in
from ..errors import UsageError
from .casefile import read
from .engine import open_ranks
from .environment import environment
from .records import CaseFile, CaseFinished, Environment
from .trial import Outcome, Trial, describe


def replay(
    path: Path, *, implementation: str | None = None, ranks: str = "processes", device: str = "cpu"
) -> Replayed | None:
    """Run the case of a file once. None on a rank of torchrun other than 0.

    implementation: run it on this one instead. Without it only built-in ones are run: no code is
    imported that only the file names. Raises UsageError for that, and for a file that is not one.
    """
    case_file = read(path)
    name = implementation or case_file.implementation
    if implementation is None and not is_built_in(name):
        raise UsageError(
            f"{path} names {name}; say so again to let its code run: --implementation {name}"
        )
    size = case_file.case.world_size
    with open_ranks(ranks, device=device) as (processes, _):
        if processes is None:
            return None
        describe(processes, name, world_size=1 if ranks == "processes" else size)
        outcome = Trial(
            processes,
            name,
            case_file.case,
            fresh=True,
            trace=case_file.status in ("crashed", "hung"),
        ).outcome(digest=True)
    return Replayed(case_file, name, outcome)


class Replayed:
    """What the replay gave, beside what the file says."""

    def __init__(self, case_file: CaseFile, implementation: str, outcome: Outcome) -> None:
        self.case_file = case_file
        self.implementation = implementation
        self.outcome = outcome

    @property
    def finished(self) -> CaseFinished:
        """The replayed case as a record."""
        return self.outcome.record(0, self.implementation, self.case_file.case)

    @property
    def verdict(self) -> str:
        """One sentence: reproduced bit for bit, the same verdict with other bits, or not."""
        was, now = self.case_file, self.outcome
        if self.implementation != was.implementation:
            return f"{self.implementation}: {now.status} (the file is of {was.implementation})"
        if was.status != now.status:
            return f"not reproduced: it was {was.status}, now it is {now.status}"
        if was.judgement is None or now.judgement is None or not was.judgement.digest:
            return f"reproduced: {now.status} again"
        if was.judgement.digest == now.judgement.digest:
            return f"reproduced bit for bit: {now.status} again, everything observed is the same"
        return f"reproduced: {now.status} again, but not with the same bits{self._why()}"

    def _why(self) -> str:
        here, there = environment(), self.case_file.environment
        differ = [
            f"{name} {getattr(there, name)} there, {getattr(here, name)} here"
            for name in Environment.__struct_fields__
            if getattr(here, name) != getattr(there, name)
        ]
        return f" ({'; '.join(differ)})" if differ else " on the same machine: it is intermittent"

    @property
    def exit_code(self) -> int:
        """0 if the case holds now, 1 otherwise."""
        return 0 if self.outcome.status in ("holds", "unsupported") else 1
