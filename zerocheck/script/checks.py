"""Comparisons that a script makes: those of the finding's obligation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..case.schema import Case
from ..errors import UsageError
from ..protocol.verdicts import Obligation, Violation
from ..run.findings.consequences import independent
from ..run.records.records import CaseFile

Check = Literal["loss", "gradient", "clip", "update"]

CHECKS: dict[Obligation, tuple[Check, ...]] = {
    "loss": ("loss",),
    "gradient": ("gradient",),
    "clip": ("clip",),
    "update": ("update",),
    "publish": ("gradient",),
}
"""What shows a violation of an obligation. What was not published shows in the next forward."""

SUMMED = 128
"""Units of round-off, relative to the largest value, that sums may be off by in a script. Each
rounds by 1/2 unit at most per term; scripts sum a few dozen terms per layer, in a few layers."""

UPDATED = 16
"""The same for parameters: an update is elementwise, with less than 10 roundings after the
states, whose own errors count by the learning rate."""


@dataclass(frozen=True)
class Margin:
    """Largest difference of two correct numbers: units of 2**-24 of the largest, and the reason."""

    units: int
    why: str


def checks_of(file: CaseFile, *, replicated: bool) -> tuple[Check, ...]:
    """Return the comparisons; none for a crash or hang, where it is enough to run.

    replicated: every rank has all parameters.

    Raises UsageError for an obligation that a script of torch alone does not show.
    """
    if file.status in ("crashed", "hung"):
        return ()
    violation = judged_violation(file)
    if violation is None:
        found: tuple[Check, ...] = ("gradient", "update")
        return ("gradient", "clip", "update") if file.case.training.clip is not None else found
    obligation = violation.obligation
    if obligation not in CHECKS:
        raise UsageError(
            f"a script cannot show that {obligation!r} is violated; it can show: "
            f"{', '.join(CHECKS)}"
        )
    if obligation == "publish" and replicated:
        return ("update",)  # a copy that was not updated
    return CHECKS[obligation]


def steps_of(file: CaseFile) -> int:
    """Return the number of steps to take.

    They lead to the first wrong one, and one further where only the next forward shows the
    violation.
    """
    violation = judged_violation(file)
    if violation is None:
        return file.case.training.steps
    return violation.step + (2 if violation.obligation == "publish" else 1)


def judged_violation(file: CaseFile) -> Violation | None:
    """Return the violation of the file's finding: the one that its title explains, else the first.

    A case may show several.
    """
    if file.judgement is None:
        return None
    violations = independent(file.judgement.violations)
    named = [violation for violation in violations if violation.explanation == file.title]
    return next(iter(named or violations), None)


def margin(case: Case, checks: tuple[Check, ...]) -> Margin | None:
    """Return the margin of a comparison, None where nothing is compared."""
    if not checks:
        return None
    if checks == ("update",):
        return Margin(UPDATED, "the optimizer rounds an element less often than that")
    return Margin(SUMMED, "sums in another order differ by less than that")
