"""Results of the pytest tests: one for each obligation and group of features of a run.

A finding fails the test of its obligation in each group of features that its smallest case needs;
the group `basic` has findings that need none, and those for which that is not known. So the name of
a failed test says where to look, and the tests that a bug fails do not depend on how many cases
happened to have a feature. The cases decide which groups were exercised. A run that fails on the
command line fails in some test, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..case.features import BASIC, FEATURES, GROUPS, OF_RESUME
from ..protocol.verdicts import RESUME, TITLES, Obligation
from ..run.records.finding_text import finding_text
from ..run.records.records import Finding
from ..run.records.tally import FAILING, Tally, leaving_out, why_nothing
from .known_issues import known_issue_text, stale_text
from .text import cell_text


class TestOutcome(NamedTuple):
    """Result of a test. detail: tracebacks, stacks and output of ranks that crashed or hung."""

    outcome: Literal["passed", "failed", "known", "skipped"]
    text: str = ""
    detail: str = ""


PASSED = TestOutcome("passed")


def groups_of(obligation: Obligation) -> tuple[str, ...]:
    """Return the groups of features with a test; checkpoints only for obligations of resume."""
    of_resume = {FEATURES[name].dimension for name in OF_RESUME}
    return tuple(name for name in GROUPS if obligation in RESUME or name not in of_resume)


def outcome_of(counted: Tally, name: str, obligation: Obligation, group: str) -> TestOutcome:
    """Return the result of an obligation and a feature group for the implementation `name`."""
    without = counted.started.without if counted.started is not None else {}
    if obligation in without:
        return TestOutcome("skipped", f"{obligation}: {without[obligation]}")
    implementation = counted.implementations[name]
    cell = implementation.cells[obligation]
    if cell.status in FAILING:
        failed = _failed(counted, name, obligation, group)
        if failed is not None:
            return failed
    if group == BASIC:
        stale = stale_text(counted, name, obligation)
        if stale:
            return TestOutcome("failed", stale)
    if implementation.nothing_checked:
        return TestOutcome("failed", f"nothing was checked: {why_nothing(implementation)}")
    if cell.status == "known" and group == BASIC:
        text = known_issue_text(counted, name, obligation)
        return TestOutcome("known", f"{obligation}: {cell_text(cell)}: {text}")
    if cell.groups[group]:
        return PASSED
    cases = sum(cell.counts.values())
    # As on the command line: a case that failed early may have been the one for an obligation.
    failing = any(implementation.cases[status] for status in FAILING)
    if not cell.checked and obligation in implementation.without:
        return TestOutcome("skipped", f"{obligation}: {implementation.without[obligation]}")
    if group == BASIC and not cell.checked and not failing:
        return TestOutcome(
            "failed",
            f"nothing was checked for {obligation}: none of {cases} cases exercised it "
            f"({leaving_out('obligations', obligation)})",
        )
    return TestOutcome(
        "skipped", f"{obligation} with features of {group}: not exercised in {cases} cases"
    )


def coverage_outcome(counted: Tally, name: str) -> TestOutcome:
    """Return the result of the coverage test: whether all promised pairs were exercised."""
    implementation = counted.implementations[name]
    if implementation.nothing_checked:
        return TestOutcome("failed", f"nothing was checked: {why_nothing(implementation)}")
    left_out = implementation.covered.sentence(name)
    return TestOutcome("failed", left_out) if left_out else PASSED


def _failed(counted: Tally, name: str, obligation: Obligation, group: str) -> TestOutcome | None:
    """Return the failure if it belongs to the group; one without a finding belongs to BASIC."""
    findings = counted.findings_of(name, obligation)
    others = [f for f in counted.findings_of(name) if obligation in f.follows and f not in findings]
    of_group = [f for f in (*findings, *others) if group in _places(f, groups_of(obligation))]
    if not of_group and (group != BASIC or findings or others):
        return None
    cell = cell_text(counted.implementations[name].cells[obligation])
    texts = [
        finding_text(finding)
        if finding in findings
        else f"{obligation}: {cell}, which may follow from this:\n{finding_text(finding)}"
        for finding in of_group
    ]
    detail = "\n".join(finding.detail for finding in of_group if finding.detail)
    return TestOutcome(
        "failed", "\n\n".join(texts) or f"{obligation}: {cell}: {TITLES[obligation]}", detail
    )


def _places(finding: Finding, among: Sequence[str]) -> Sequence[str]:
    """Return the groups in whose tests the finding shows."""
    return [group for group in finding.groups if group in among] or [BASIC]
