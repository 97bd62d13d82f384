"""Sections that several formats share: environment, observability, and leaked global state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..foreign_text import one_line
from ..run.records.tally import ImplementationTally, Tally, unchecked


def environment_rows(counted: Tally) -> list[tuple[str, str]]:
    """Return (name, value) of the environment and options, and of what was not checked."""
    started = counted.started
    if started is None:
        return []
    rows = [
        (name, str(getattr(started.environment, name)))
        for name in started.environment.__struct_fields__
        if getattr(started.environment, name) != ""
    ]
    rows += [("profile", started.profile), ("seed", str(started.seed))]
    rows += [("model", started.model)] if started.model else []
    rows += [(str(o), f"not checked: {reason}") for o, reason in started.without.items()]
    return rows + [
        (f"{obligation} of {name}", f"not checked: {reason}")
        for name, obligation, reason in unchecked(counted)
    ]


TIERS = {
    "state only": "gradients were not shown in {cases} (step.reached was not called), so they were "
    "recovered from states",
    "parameters only": "the optimizer shows no states in {cases}: update was judged by the range "
    "that parameters can be in, all else in full. For moments and step counts give "
    "Built(states=...), or keep torch's optimizer in an attribute of yours",
}
"""Meaning of each tier of observability, and what to add for more."""


def observability_lines(counted: Tally) -> list[str]:
    """Return the lines on placement and observability for the end of a run.

    One for the placement of each implementation, with a warning where nothing is sharded, and one
    for each tier below full.
    """
    lines: list[str] = []
    for one in counted.implementations.values():
        lines += [f"{one.name}: {text}" for text in (*placement(one), *_tiers(one))]
    return [one_line(line) for line in lines]


def placement(one: ImplementationTally) -> list[str]:
    """Return the placement observed on the most ranks, and a warning if nothing is sharded."""
    if not one.placement:
        return []
    ranks = max(one.placement)
    kinds = one.placement[ranks]
    parts = [f"{kind} {_words(shares)}" for kind, shares in kinds.items()]
    lines = [f"on {ranks} ranks {', '.join(parts)}"]
    every = [
        share for kinds in one.placement.values() for shares in kinds.values() for share in shares
    ]
    if one.stage is None and min(every) == 1.0:
        lines.append(
            "nothing is sharded: every case left all parameters, gradients and optimizer states on "
            "a rank. Right for DDP (declare stage = 0); else the wrapper had no effect here"
        )
    return lines


def _words(shares: Iterable[float]) -> str:
    """Describe a placement, with the number of cases if there are both.

    `sharded (a rank holds 34 to 50 %)`, `replicated`.
    """
    every = list(shares)
    cut = sorted(share for share in every if share < 1.0)
    if not cut:
        return "replicated"
    least, most = (f"{100 * share:.0f}" for share in (cut[0], cut[-1]))
    text = f"sharded (a rank holds {least if least == most else f'{least} to {most}'} %)"
    return text if len(cut) == len(every) else f"{text} in {len(cut)} of {len(every)} cases"


def _tiers(one: ImplementationTally) -> list[str]:
    return [
        text.format(cases=f"{one.tiers[tier]} case{'s' if one.tiers[tier] > 1 else ''}")
        for tier, text in TIERS.items()
        if one.tiers[tier]
    ]


LEAKED = (
    "Ranks run one case after another. What a case leaves changed in its process (default dtype, "
    "hooks, patched functions) is put back, or the process is replaced, so that no other case "
    "sees it; in a training it stays."
)
NOT_REPRODUCED = (
    "What failed in no fresh process does not fail the run: its case is judged by the fresh ones."
)


def leak_lines(counted: Tally) -> Iterator[str]:
    """Yield a line for each implementation and kind of state.

    `"mine.py:Mine left grad mode off (12 cases)"`.
    """
    for name, implementation in counted.implementations.items():
        for leak, cases in implementation.leaks.most_common():
            yield one_line(f"{name} {leak} ({cases} case{'s' if cases > 1 else ''})")
