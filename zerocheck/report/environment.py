"""Environment and options of a run, as rows."""

from __future__ import annotations

from ..run.records.tally import Tally, unchecked


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
