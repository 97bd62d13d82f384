"""Recorder of findings: a case file and a record of each, written again when more is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ...catalogue import is_built_in
from ...protocol.verdicts import Obligation, Violation
from ..plan.plan import PlannedCase
from ..records.records import CaseFile, CaseFinished, Environment, Finding, KnownReference
from .bug import Bug
from .case_file import check_folder, of_bug, write
from .findings import Findings


class FindingRecorder:
    """Recorder of a run's findings.

    folder: of the case files; handle: takes the records; similar: see `KnownIssueMatcher`.
    """

    def __init__(
        self,
        findings: Findings,
        environment: Environment,
        obligations: tuple[Obligation, ...],
        folder: Path,
        handle: Callable[[Finding], None],
        similar: Callable[[CaseFinished, Violation | None], KnownReference | None],
    ) -> None:
        check_folder(folder)
        self._findings = findings
        self._environment = environment
        self._obligations = obligations
        self._folder = folder
        self._handle = handle
        self._similar = similar
        self._reported: dict[int, Finding] = {}

    def write(self, bug: Bug) -> None:
        """Write the bug's case file, in place of an earlier one, and the record of the finding."""
        if bug.case_file:
            Path(bug.case_file).unlink(missing_ok=True)
        if bug.merged is not None:
            bug.case_file = ""
            self.report(bug)
            return
        case_file = of_bug(bug, self._environment, self._obligations)
        bug.case_file = str(write(self._folder, bug.slug, case_file))
        self.report(bug)

    def report(self, bug: Bug) -> None:
        """Record the finding, unless the last record of it says the same."""
        finding = bug.finding(self._findings.bugs.index(bug))
        if finding.known is None and finding.merged is None:
            violation = bug.violation and bug.violation.narrowed(finding.causes)
            finding = replace(finding, similar=self._similar(bug.first, violation))
        if self._reported.get(finding.number) != finding:
            self._reported[finding.number] = finding
            self._handle(finding)

    def lost(self, running: PlannedCase | None) -> str:
        """Write the case that ran when ranks were lost; return how to run it, empty if none ran.

        It may have killed them.
        """
        if running is None:
            return ""
        path = write(
            self._folder,
            "ranks-lost",
            CaseFile(
                implementation=running.implementation,
                case=running.case,
                status="crashed",
                judgement=None,
                environment=self._environment,
                title="ranks were lost while it ran",
                obligations=self._obligations,
            ),
        )
        named = f" --implementation {running.implementation}"
        return (
            "; the case under way can be run on one machine, which shows if it kills ranks: "
            f"zerocheck replay {path}{'' if is_built_in(running.implementation) else named}"
        )
