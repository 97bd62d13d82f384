"""Notes every collective that this rank calls, by one dispatch mode on torch's `c10d` operators.

It sees what Python wrappers do not: DDP's reducer, FSDP2's backward, the norm of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..compat import comes_first

NAMESPACES = ("c10d", "_c10d_functional")
IGNORED = frozenset(("wait_tensor",))


def is_collective(func: Any) -> bool:
    """Whether an operator communicates, or at least begins to."""
    return func.namespace in NAMESPACES and _name(func) not in IGNORED


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2].rstrip("_"))


class CollectiveTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, calls `note(name, sequence number)` before each collective starts.

    Sequence numbers count from 1 over this rank's collectives, whatever their kind.
    """

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if comes_first(types):
            return NotImplemented
        if is_collective(func):
            self.names.append(_name(func))
            self._note(self.names[-1], len(self.names))
        return func(*args, **(kwargs or {}))
