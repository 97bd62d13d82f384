"""Lines on global state that cases left changed in their rank processes."""

from __future__ import annotations

from collections.abc import Iterator

from ..foreign_text import one_line
from ..run.records.tally import Tally

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
