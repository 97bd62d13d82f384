"""Page of all causes: `python -m zerocheck.faults.causes_page` prints docs/causes.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ..causes.registry import Cause, registered
from .registry import NAMED_FAULTS

HEADING = """# Causes

A finding names its obligation, and the *cause* that explains it: a known bug of sharding code. This
page says of each cause what it looks like, what the usual reason is, and which planted fault shows
it (`zerocheck faults NAME`). Known issues name causes by these texts. This page is generated; edit
`zerocheck/causes/`.

The tier says how a cause is found. 1: the bug was computed and compared with what was observed.
2: the same, but only where no cause of tier 1 explains the violation. 3: a hint where nothing else
does.
"""

BROKEN = "crashed or hung"
"""Heading of causes without an obligation."""


def shown_by(cause: Cause) -> list[str]:
    """Return the names of the planted faults that show a cause."""
    return [
        name
        for name, fault in NAMED_FAULTS.items()
        if not set(fault.causes).isdisjoint(cause.texts)
    ]


def page() -> str:
    """Return the page as Markdown."""
    sections: dict[str, list[Cause]] = {}
    for cause in registered():
        sections.setdefault(cause.of[0] if cause.of else BROKEN, []).append(cause)
    lines = [HEADING]
    for obligation, causes in sections.items():
        lines.append(f"## {obligation}\n")
        for cause in causes:
            lines += _entry(cause)
    return "\n".join(lines)


def _entry(cause: Cause) -> Iterator[str]:
    yield f"### {_title(cause)}\n"
    yield f"{cause.shows}\n"
    yield f"- Usual reason: {cause.usual}"
    if len(cause.of) > 1:
        yield f"- Named under: {', '.join(cause.of)}"
    if len(cause.texts) > 1:
        yield f"- Texts: {'; '.join(f'`{text}`' for text in cause.texts)}"
    if cause.aliases:
        yield f"- Older names: {'; '.join(f'`{text}`' for text in cause.aliases)}"
    faults = ", ".join(f"`{name}`" for name in shown_by(cause)) or "none planted"
    yield f"- Shown by: {faults}"
    yield f"- Tier: {cause.tier}\n"


def _title(cause: Cause) -> str:
    """Return a heading: the text, with an ellipsis for a field, or all texts of a bare field."""
    title = re.sub(r"\{\w+\}", "…", cause.text)
    return title if title != "…" else ", ".join(cause.texts)


if __name__ == "__main__":
    sys.stdout.write(page())
