"""Description of a fault: its source, and the finding that it must cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Known bug, planted on purpose.

    where: `module:Class`, as `zerocheck run` takes it; parent: the implementation without the
    fault; summary: what it does, in plain words; source: where it was seen; obligation: flagged
    first, or None where the ranks crash or hang; causes: what the judge names, () where diagnosis
    has no name for it; spares: obligations that must not be flagged; mild: only a report is wrong.
    A case shows it only with `features`, `world` ranks or more and `microbatches` or more.

    injected: which fault is injected into the collectives of `parent` (see injected.py), "" for a
    sharder of its own; sometimes: the share of runs that show it on the cases of tests/faults, as
    measured, where that depends on the moment; 1.0 where every run does.
    """

    name: str
    where: str
    parent: str
    summary: str
    source: str
    obligation: str | None
    causes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    mild: bool = False
    features: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Features that would hide it."""
    world: int = 2
    microbatches: int = 1
    injected: str = ""
    sometimes: float = 1.0


STATE = ("ownership", "loss", "update", "publish", "buffers")
FORWARD = (*STATE, "gradient")
EVERY_STEP = (*FORWARD, "clip")


def fault(
    where: str,
    parent: str,
    obligation: str | None,
    summary: str,
    source: str,
    cause: str = "",
    **needs: object,
) -> Fault:
    """Make a fault, named by its class: `gradient:LossTimesWorld` is `loss-times-world`."""
    module, _, kind = where.partition(":")
    name = "".join(f"-{c.lower()}" if c.isupper() else c for c in kind).lstrip("-")
    return Fault(
        name=name,
        where=f"zerocheck.faults.{module}:{kind}",
        parent=parent,
        summary=summary,
        source=source,
        obligation=obligation,
        causes=(cause,) if cause else (),
        **needs,  # type: ignore[arg-type]
    )
