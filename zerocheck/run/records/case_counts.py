"""Text of what became of the cases of a run. Every report counts cases by these words.

A *case* is one that was run; each has one status, so the counts of a sentence add up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from ...protocol.verdicts import Status

WORDS: dict[Status, str] = {
    "violated": "violated",
    "crashed": "crashed",
    "hung": "hung",
    "holds": "passed",
    "known": "with known issues",
    "not exercised": "that exercised nothing",
    "unsupported": "unsupported",
}
"""Statuses of cases, in the order and the words of a summary."""

REASONS = 4
"""Commonest reasons for unsupported cases that a summary names."""


def case_count(count: int) -> str:
    """Format a number of cases: `"1 case"`, `"48 cases"`."""
    return f"{count:,} case{'' if count == 1 else 's'}"


def outcomes(cases: Mapping[Status, int], planned: int = 0) -> str:
    """Format all cases by status: `"51 cases (48 planned, 3 added): 34 passed, 17 unsupported"`.

    planned: cases announced at the start, if others may have been added since.
    """
    total = sum(cases.values())
    added = f" ({planned:,} planned, {total - planned:,} added)" if 0 < planned < total else ""
    parts = [f"{cases[status]:,} {word}" for status, word in WORDS.items() if cases.get(status)]
    return f"{case_count(total)}{added}{': ' if parts else ''}{', '.join(parts)}"


def unsupported_lines(reasons: Iterable[Counter[str]]) -> list[str]:
    """Format why cases are unsupported, a line for each of the commonest reasons; may be empty.

    reasons: of each implementation, its unsupported cases by reason. Those that differ in what has
    a number, such as names and shapes, are one.
    """
    kinds: dict[str, Counter[str]] = {}
    for counts in reasons:
        for reason, count in counts.items():
            words = [word for word in reason.split() if not re.search(r"\d", word)]
            kinds.setdefault(" ".join(words), Counter())[reason] += count
    common = sorted(kinds.values(), key=Counter.total, reverse=True)
    rest = sum(map(Counter.total, common[REASONS:]))
    lines = [
        f"{case_count(kind.total())} unsupported: {kind.most_common(1)[0][0]}"
        for kind in common[:REASONS]
    ]
    return [*lines, *([f"{case_count(rest)} unsupported for other reasons"] if rest else [])]
