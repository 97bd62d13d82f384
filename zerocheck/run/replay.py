"""Replay of one case, as in a case file, in fresh rank processes.

A case runs once, if that is enough. An intermittent failure is run several times, and counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

import msgspec

from ..case.schema import Case
from ..errors import ExitCode
from ..machine.devices import CPU, kind_of
from ..models.user import forget_factories
from ..ranks.pool import Pool
from .execute.environment import environment
from .execute.rank_pool import RankPool
from .execute.rank_requests import describe
from .execute.trial import Trial
from .execute.user_model import case_with
from .execute.user_optimizer import case_with_optimizer
from .findings.confirmation import TRIES, fails_alike, in_a_word, runs_to_see
from .findings.findings import failures_of
from .records.records import CaseFile, CaseFinished, Environment, Finding, Outcome
from .records.tally import FAILING


def replay(
    case_file: CaseFile,
    *,
    implementation: str | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    ranks: RankPool,
) -> ReplayedCase:
    """Run the case of a file, several times if its result depends on timing.

    implementation: run it on this one instead; model, optimizer: the user's own that the case has,
    by their names or where they are here.
    """
    name = implementation or case_file.implementation
    forget_factories()
    smallest = 1 if isinstance(ranks, Pool) else case_file.case.world_size
    describe(ranks, name, world_size=smallest)
    changed = ""
    if model is not None:
        case = case_with(ranks, case_file.case, model, world_size=smallest)
        changed = _changed(case_file.case, case)
        case_file = msgspec.structs.replace(case_file, case=case)
    if optimizer is not None:
        case = case_with_optimizer(ranks, case_file.case, optimizer, world_size=smallest)
        if case.optimizer != case_file.case.optimizer:
            changed += "; the optimizer is not that of the file, or is elsewhere"
        case_file = msgspec.structs.replace(case_file, case=case)
    replayed = ReplayedCase(case_file, name, changed=changed, device=ranks.device)
    while len(replayed.outcomes) < replayed.runs:
        trial = Trial(
            ranks,
            name,
            case_file.case,
            fresh=True,
            trace=case_file.status in ("crashed", "hung"),
            obligations=case_file.obligations,
        )
        replayed.outcomes.append(trial.outcome(digest=True, words=True))
    return replayed


def _changed(was: Case, now: Case) -> str:
    """Describe how the user's model differs from that of the file; empty where it does not."""
    if was.model.user is None or now.model.user is None:
        return ""
    there, here = was.model.user.parameters, now.model.user.parameters
    if there == here:
        return ""
    pairs = zip_longest(there, here)
    before, after = next((one, other) for one, other in pairs if one != other)
    named = before or after
    assert named is not None
    return f"; the model is not that of the file: {named.name} differs"


class ReplayedCase:
    """Result of a replay, compared with the case file.

    outcomes: of each run; changed: how the user's model differs from the one in the file; device:
    where it runs now.
    """

    def __init__(
        self, case_file: CaseFile, implementation: str, *, changed: str = "", device: str = CPU
    ) -> None:
        self.case_file = case_file
        self.changed = changed
        self.device = device
        self.implementation = implementation
        self.outcomes: list[Outcome] = []

    @property
    def runs(self) -> int:
        """Number of runs that the replay needs, by the outcomes so far.

        One is enough for what showed always, and shows again. A hang costs seconds, so it is not
        waited for more often than a run does.
        """
        was = self.case_file
        if "unsupported" in {outcome.status for outcome in self.outcomes}:
            return 1
        if was.status != "holds" and was.confirmed < was.tries:
            return TRIES if was.status == "hung" else runs_to_see(was.confirmed, was.tries)
        again = self.implementation == was.implementation and was.status != "holds"
        return TRIES if again and self.outcomes and not self.alike(self.outcomes[0]) else 1

    def alike(self, outcome: Outcome) -> bool:
        """Return True if a run fails as in the file: by the same crash, hang or obligation."""
        was = self.case_file
        violations = () if was.judgement is None else was.judgement.violations
        return fails_alike(was.status, [violation.obligation for violation in violations], outcome)

    @property
    def outcome(self) -> Outcome:
        """Outcome to show: one that fails as the file says, else one that fails."""
        failing = [one for one in self.outcomes if one.status in FAILING]
        same_violation = [one for one in failing if self.alike(one)]
        return (same_violation or failing or self.outcomes)[0]

    @property
    def finished(self) -> CaseFinished:
        """Replayed case as a record."""
        return self.outcome.record(0, self.implementation, self.case_file.case)

    @property
    def findings(self) -> list[Finding]:
        """Failures of the replayed case, by the causes that the run left of them."""
        return failures_of(self.finished, self.case_file.causes)

    @property
    def verdict(self) -> str:
        """Sentence on the result: reproduced bit for bit, equal verdict with other bits, or not."""
        return self._verdict() + self.changed + self._elsewhere() + self._named()

    def _verdict(self) -> str:
        was, now = self.case_file, self.outcome
        if len(self.outcomes) > 1:
            return self._counted()
        if self.implementation != was.implementation:
            return f"{self.implementation}: {now.status} (the file is of {was.implementation})"
        if was.status != now.status:
            return f"not reproduced: it was {was.status}, now it is {now.status}"
        if was.judgement is None or now.judgement is None or not was.judgement.digest:
            return f"reproduced: {now.status} again"
        if was.judgement.digest == now.judgement.digest:
            return f"reproduced bit for bit: {now.status} again, everything observed is the same"
        return f"reproduced: {now.status} again, but not with the same bits{self._why()}"

    def _counted(self) -> str:
        """Return a sentence on the number of runs that reproduced the failure."""
        count, shown = len(self.outcomes), sum(map(self.alike, self.outcomes))
        others = Counter(in_a_word(one) for one in self.outcomes if not self.alike(one))
        text = ", ".join(f"{what} {times}" for what, times in others.items())
        name = self.implementation
        whose = "" if name == self.case_file.implementation else f"{name}: "
        if shown == count:
            return f"{whose}reproduced: it shows in each of {count} runs"
        if shown:
            return f"{whose}intermittent: it shows in {shown} of {count} runs (otherwise: {text})"
        return f"{whose}not reproduced in {count} runs: {text}; it was {self.case_file.status}"

    def _elsewhere(self) -> str:
        """Return a note that the failure was found on another kind of device, if so."""
        was, now = self.case_file.environment, kind_of(self.device)
        if was.device == now:
            return ""
        found = f"{was.device} ({was.gpu})" if was.gpu else was.device
        hidden = ", and what needs a GPU does not show" if now == CPU else ""
        return f"; it was found on {found}, and ran on the {now} now: its bits are others{hidden}"

    def _named(self) -> str:
        """Return the title that the run gave the finding, if this case looks like another bug.

        The cases of a run refute what explains a single one.
        """
        was = self.case_file
        if self.implementation != was.implementation or not was.causes:
            return ""
        if was.status != "violated" or not self.alike(self.outcome):
            return ""
        if any({*was.causes} & {*finding.causes} for finding in self.findings):
            return ""
        return f"\nThe run named it by all its failing cases: {was.title}"

    def _why(self) -> str:
        here, there = environment(self.device), self.case_file.environment
        differ = [
            f"{name} {getattr(there, name) or 'none'} there, {getattr(here, name) or 'none'} here"
            for name in Environment.__struct_fields__
            if getattr(here, name) != getattr(there, name)
        ]
        return f" ({'; '.join(differ)})" if differ else " on the same machine: it is intermittent"

    @property
    def exit_code(self) -> ExitCode:
        """HOLDS if the case holds now, in every run; FAILS otherwise."""
        return ExitCode.FAILS if self.outcome.status in FAILING else ExitCode.HOLDS
