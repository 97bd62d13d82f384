"""Text of a checked step, in the words of a finding of `zerocheck run`."""

from __future__ import annotations

import sys

from ..foreign_text import one_line, printable
from ..protocol.verdicts import Judgement, Violation
from ..run.findings.consequences import independent
from ..run.known_issues.entries import joined
from ..run.records.finding_text import finding_text
from ..run.records.records import Finding
from .record.ranks import Problem
from .recorder import Trace


def finding(what: str, judgement: Judgement, bundle: str) -> Finding:
    """Return the first violation as a finding. bundle: the argument for `replay`."""
    first = first_of(judgement)
    return Finding(
        number=0,
        fingerprint=fingerprint(what, first),
        implementation=what,
        status="violated",
        title=first.explanation,
        case_number=0,
        obligation=first.obligation,
        violation=first,
        causes=first.causes,
        estimated=first.bound is not None and first.obligation in judgement.estimated,
        follows=tuple(v.obligation for v in judgement.violations if v is not first),
        case_file=bundle,
    )


def first_of(judgement: Judgement) -> Violation:
    """Return the violation from which the others can follow."""
    return independent(judgement.violations)[0]


def fingerprint(what: str, violation: Violation) -> str:
    """Return a key of the finding without numbers: what is checked, obligation, role and causes."""
    return joined(what, violation.obligation, violation.role, "+".join(violation.causes))


def violated_text(what: str, judgement: Judgement, bundle: str) -> str:
    """Return the text of the finding."""
    return finding_text(finding(what, judgement, bundle))


def stopped_text(number: int, problem: Problem) -> str:
    """Return why no step is checked from now on. number: of the step, 0 before the first."""
    when = f"step {number}: " if number else ""
    end = "No step is checked from here on; the training goes on"
    text = one_line(problem.text)
    if not problem.place:
        return f"zerocheck: {when}{text} (rank {problem.rank}). {end}"
    return (
        f"zerocheck: {when}zerocheck itself failed on rank {problem.rank} at {problem.place}: "
        f"{text}. {end}. Please report this line"
    )


def untraced_text(before: int, number: int) -> str:
    """Return which steps may be wrong already.

    before: the last step that was checked before, or the one before the first; number: of the
    checked step that is wrong.
    """
    if number - before < 2:
        return ""
    return (
        f"  before it   {_steps(before + 1, number - 1)} not checked: the first wrong one may be "
        "among them; recorder='1GiB' keeps them"
    )


def traced_text(before: int, trace: Trace, first: int, number: int, *, alone: bool) -> str:
    """Return how the first wrong step was found.

    first: its number; number: that of the checked one; before: as above; alone: no earlier
    finding.
    """
    numbers = trace.kept
    lost = min(numbers, default=first) - before > 1
    text = f"  first step  {first} is the first wrong one{' of those kept' if lost else ''}"
    text += "" if alone else f" since step {before}"
    earlier = [step for step in numbers if step < first]
    if earlier and [*trace.held] == earlier:
        text += f": {_steps(earlier[0], earlier[-1])} recorded and hold"
    elif trace.held:
        judged = f"{trace.judged} of {len(numbers)} recorded steps were judged"
        text += f": step {max(trace.held)} holds; {judged}"
    if lost:
        text += f"; {_steps(before + 1, min(numbers, default=first) - 1)} not kept"
    return text + (f"; found as step {number} was checked" if first != number else "")


def _steps(first: int, last: int) -> str:
    return f"step {first} was" if first == last else f"steps {first} to {last} were"


def holds_line(number: int, judgement: Judgement, seconds: float) -> str:
    """Return one line on a step in which all that was judged holds."""
    held = [
        f"{obligation} (estimated)" if obligation in judgement.estimated else obligation
        for obligation, status in judgement.statuses.items()
        if status == "holds"
    ]
    share = max(judgement.share.values(), default=0.0)
    line = (
        f"zerocheck: step {number}: {', '.join(held)} hold, at most {share:.0%} of a bound used "
        f"({judgement.tier}; checked in {seconds:.2f} s)"
    )
    for obligation, why in judgement.unjudged.items():
        line += f"; {obligation} not judged: {why}"
    return one_line(line)


def say(text: str) -> None:
    """Print next to the output of the training."""
    print(printable(text), file=sys.stderr, flush=True)
