"""Verdicts on single cases of one implementation, on the rank processes that all tests share."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from ..case.schema import Case
from ..case.validity import check
from ..run.execute.environment import environment
from ..run.execute.shared_ranks import shared_ranks
from ..run.execute.trial import Trial
from ..run.findings.bug import Bug
from ..run.findings.case_file import of_bug, write
from ..run.findings.confirmation import confirm
from ..run.findings.findings import Findings
from ..run.findings.issue_matcher import KnownIssueMatcher
from ..run.known_issues.releases import Releases
from ..run.plan.options import RunOptions
from ..run.records.finding_text import finding_text
from ..run.records.records import Finding


@dataclass(frozen=True, kw_only=True)
class SingleVerdict:
    """Verdict on one case, known issues aside."""

    text: str = ""
    """Findings, with the commands to replay them; empty if all obligations hold."""
    detail: str = ""
    """Tracebacks, stacks and output of ranks that crashed or hung."""
    unsupported: str = ""
    """Reason why the implementation does not support the case, or an empty text."""
    notes: tuple[str, ...] = ()
    """Obligations that the case does not exercise, and known issues that it shows."""


class SingleCaseJudge:
    """Judge of the cases of one implementation that come one by one."""

    def __init__(self, options: RunOptions) -> None:
        (self._name,) = options.implementations
        self._obligations = options.obligations
        self._environment = environment(options.device)
        self._matcher = KnownIssueMatcher(options, Releases.of(self._environment))
        self._confirmed: set[str] = set()
        """Fingerprints of violations that fresh rank processes showed: shrinking needs it once."""

    def verdict(self, case: Case, folder: Path) -> SingleVerdict:
        """Run a case and judge it.

        A violation that is new counts if fresh rank processes show it too, and so does every crash.
        folder: where case files are written. Raises UsageError for a case that cannot be run.
        """
        check(case)
        ranks = shared_ranks(self._name)
        outcome = Trial(ranks, self._name, case, obligations=self._obligations).outcome(words=True)
        if outcome.status == "unsupported":
            return SingleVerdict(unsupported=outcome.reason)
        statuses = {} if outcome.judgement is None else outcome.judgement.statuses
        notes = [
            f"{one}: {status}" for one, status in statuses.items() if status == "not exercised"
        ]
        findings = []
        for bug in Findings(self._matcher.issue_of).add(outcome.record(0, self._name, case)):
            if bug.issue is not None:
                notes.append(f"known issue: {bug.issue.fingerprint}")
                continue
            if bug.violation is None or bug.fingerprint not in self._confirmed:
                confirm(bug, ranks, self._obligations)
            if bug.confirmed:
                self._confirmed.add(bug.fingerprint)
            if bug.confirmed or not bug.tries:
                findings.append(self._written(bug, folder))
            else:
                # Processes that other cases left in a state that changes this one, or a race.
                ranks.renew()
                warnings.warn(f"not reproduced in fresh rank processes: {bug.title}", stacklevel=3)
        return SingleVerdict(
            text="\n\n".join(map(finding_text, findings)),
            detail="\n".join(finding.detail for finding in findings if finding.detail),
            notes=tuple(notes),
        )

    def _written(self, bug: Bug, folder: Path) -> Finding:
        """Return the finding of a bug, with its case file, in place of that of an earlier case."""
        (folder / f"{bug.slug}.json").unlink(missing_ok=True)
        case_file = of_bug(bug, self._environment, self._obligations)
        bug.case_file = str(write(folder, bug.slug, case_file))
        return bug.finding(0)
