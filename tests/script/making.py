"""Case files made by hand, and scripts of them."""

from __future__ import annotations

from hand_made import ENVIRONMENT

from zerocheck.case.codec import merged
from zerocheck.case.schema import Case, Precision
from zerocheck.protocol.verdicts import MEMORY, Judgement, Obligation, Violation
from zerocheck.run.known_issues.entries import KnownIssue, ours
from zerocheck.run.records.records import CaseFile
from zerocheck.script import script_of, scripts


def case_file(
    implementation: str,
    obligation: Obligation | None = "gradient",
    *,
    step: int = 0,
    title: str = "something is wrong",
    **fields: object,
) -> CaseFile:
    """A file of a violated obligation at `step`, or, for None, of a case that holds."""
    violations = ()
    if obligation is not None:
        violations = (
            Violation(
                obligation=obligation,
                step=step,
                role="gradient",
                tensors=("stem.weight",),
                ranks=(0,),
                explanation=title,
            ),
        )
    return CaseFile(
        implementation=implementation,
        case=merged(Case(mesh=(3,)), fields, source="a test"),
        status="holds" if obligation is None else "violated",
        judgement=Judgement(statuses={}, violations=violations),
        environment=ENVIRONMENT,
        title=title,
    )


def in_scripts() -> list[KnownIssue]:
    """Known issues with a case that a script can show: of torch, without a checkpoint, on one mesh
    axis, in fp32, not of memory, and not of a compiled model."""
    return [
        issue
        for issue in ours()
        if issue.case is not None and not issue.case.resume and issue.obligation not in MEMORY
        if len(issue.case.mesh) == 1 and issue.implementation in scripts()
        if issue.case.precision == Precision() and issue.case.training.compile == "none"
    ]


def known(issue: KnownIssue) -> CaseFile:
    """The file that a run leaves of a known issue, but for where in the case it shows."""
    assert issue.case is not None
    flat = not issue.case.sharding.use_orig_params
    last = 0 if flat else issue.case.training.steps - 1
    made = case_file(issue.implementation, issue.obligation or "update", step=last)
    error = issue.fingerprint.split(" / ")[2] if issue.obligation is None else ""
    return CaseFile(
        implementation=issue.implementation,
        case=issue.case,
        status="violated" if issue.obligation is not None else "crashed",
        judgement=made.judgement if issue.obligation is not None else None,
        environment=ENVIRONMENT,
        title=issue.reason if not error else f"the ranks crashed: {error}: {issue.says[0]}",
    )


def script(implementation: str, obligation: Obligation | None = "gradient", **given: object) -> str:
    """The script of a case file made by hand."""
    return script_of(case_file(implementation, obligation, **given))  # type: ignore[arg-type]
