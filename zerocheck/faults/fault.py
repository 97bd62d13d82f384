"""Description of a fault, by a decorator on its class. Imports no torch.

The registry reads decorators from the source. To a class they do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from ..causes.registry import find

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Known bug, planted on purpose. A case shows it only if it has all that the fault needs."""

    name: str = ""
    """Its class: `LossTimesWorld` is `loss-times-world`."""
    where: str = ""
    """`module:Class`, as `zerocheck run` takes it."""
    parent: str = ""
    """Implementation without the fault: the named one from which its class derives, by default."""
    summary: str = ""
    """First line of the class's docstring."""
    source: str
    """Where it was seen."""
    obligation: str | None
    """Obligation that is flagged first, or None where the ranks crash or hang."""
    causes: tuple[str, ...] = ()
    """Causes that the judge names, () where diagnosis has no name for it."""
    attributed: str = ""
    """Regular expression that its attribution matches, where its cause gives none."""
    spares: tuple[str, ...] = ()
    """Obligations that must not be flagged."""
    mild: bool = False
    """True if only a report is wrong."""
    features: tuple[str, ...] = ()
    """Features that a case needs."""
    without: tuple[str, ...] = ()
    """Features that would hide it."""
    world: int = 2
    """Number of ranks that it needs."""
    microbatches: int = 1
    """Number of microbatches that it needs."""
    injected: str = ""
    """Name of the fault that is injected into the collectives of `parent`, "" for other faults."""
    sometimes: float = 1.0
    """Share of runs that show it, as measured on the cases of tests/faults; 1.0 for every run."""

    def __call__(self, kind: type[T]) -> type[T]:
        """Return the class as it is."""
        return kind


STATE = ("ownership", "loss", "update", "publish", "buffers")
FORWARD = (*STATE, "gradient")
EVERY_STEP = (*FORWARD, "clip")
OF_BYTES = ("persistent", "peak", "release")
"""Obligations whose faults spare those of every step: each number is right."""


def fault(cause: str = "", *, source: str, **needs: Any) -> Fault:
    """Describe the fault that the class below is. needs: further fields of Fault.

    Its obligation, if it is not among them, is the first under which its cause is named. Raises
    ValueError for an unknown cause, and for a fault with neither a cause nor an obligation.
    """
    named = find(cause)
    if named is None and (cause or "obligation" not in needs):
        raise ValueError(f"no cause is called {cause!r}" if cause else "no cause, no obligation")
    fields = {"obligation": named.of[0] if named is not None and named.of else None, **needs}
    if fields["obligation"] in OF_BYTES:
        fields.setdefault("spares", EVERY_STEP)
    return Fault(causes=(cause,) if cause else (), source=source, **fields)
