"""Text of what became of the cases of a run. Every report counts cases by these words.

A *case* is one that was run; each has one status, so the counts of a sentence add up.
"""

from __future__ import annotations

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

REASONS = 2
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

    reasons: of each implementation, its unsupported cases by reason.
    """
    total: Counter[str] = Counter()
    for counts in reasons:
        total.update(counts)
    common = total.most_common(REASONS)
    rest = total.total() - sum(count for _, count in common)
    lines = [f"{case_count(count)} unsupported: {reason}" for reason, count in common]
    return [*lines, *([f"{case_count(rest)} unsupported for other reasons"] if rest else [])]
