"""Text of the loads of resumed cases: a table of world sizes, and a line per kind of damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..protocol.verdicts import STATUSES, Gave, Status
from ..run.records.loads import DamagedLoads, Loads

TITLE = "Loads by world size: saved down, loaded across"

HARM = {
    "killed": "writers killed",
    "flip": "bits flipped",
    "truncate": "files cut short",
    "remove": "files removed",
    "mix": "files of another checkpoint put in",
}
"""What was done to checkpoints, in the plural, by how often it is counted."""

_GAVE: dict[Gave, tuple[str, str]] = {
    "new": ("gave the new checkpoint", "loaded right all the same"),
    "older": ("the older one", ""),
    "none": ("reported that there is none", "refused"),
    "lost": ("reported none though there was an older one", ""),
    "wrong": ("gave neither", "loaded wrong"),
    "unharmed": ("had finished before", "had nothing to damage"),
}
"""What a load gave: of a checkpoint whose writer was killed, and of a damaged one."""


def cell_lines(verdicts: Mapping[Status, int]) -> list[str]:
    """Return the loads that hold, and the results of others: `["11", "1 violated"]`.

    A dash for none.
    """
    holds = [str(verdicts["holds"])] if verdicts.get("holds") else []
    others = [f"{verdicts[s]} {s}" for s in STATUSES if s != "holds" and verdicts.get(s)]
    return [*holds, *others] or ["–"]


def headers(loads: Loads) -> list[str]:
    """Return the headers of the table: the label of the rows, and the world sizes that loaded."""
    return ["ranks", *map(str, loads.loaded)]


def rows(loads: Loads, *, between: str) -> list[list[str]]:
    """Return a row for each world size that saved. between: separates the verdicts of a cell."""
    return [
        [str(saved)]
        + [
            between.join(cell_lines(loads.pairs.get((saved, loaded), Counter())))
            for loaded in loads.loaded
        ]
        for saved in loads.saved
    ]


def tried_lines(loads: Loads) -> list[str]:
    """Return one line for each kind of damage done to checkpoints before they were loaded."""
    return [_line(kind, loads.tried[kind]) for kind in HARM if kind in loads.tried]


def _line(kind: str, tried: DamagedLoads) -> str:
    """Format one: `57 writers killed: 31 gave the new checkpoint, 20 the older one; 1 violated`."""
    damaged = kind != "killed"
    gave = [
        f"{tried.gave[one]} {words[damaged]}" for one, words in _GAVE.items() if tried.gave[one]
    ]
    others = [f"{n} {s}" for s in STATUSES if s != "holds" and (n := tried.verdicts[s])]
    text = "; ".join(", ".join(part) for part in (gave, others) if part)
    return f"{sum(tried.verdicts.values())} {HARM[kind]}: {text}"


def as_data(loads: Loads) -> dict[str, Any]:
    """Return the loads for the JSON report."""
    return {
        "by_world_size": [
            {"saved": saved, "loaded": loaded, "verdicts": {s: v[s] for s in STATUSES if v[s]}}
            for (saved, loaded), v in sorted(loads.pairs.items())
        ],
        "tried": {
            kind: {
                "verdicts": {s: tried.verdicts[s] for s in STATUSES if tried.verdicts[s]},
                "gave": {one: tried.gave[one] for one in _GAVE if tried.gave[one]},
            }
            for kind, tried in loads.tried.items()
        },
    }
