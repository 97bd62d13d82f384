"""Notes every collective that this rank calls, by one dispatch mode on torch's `c10d` operators.

It sees what Python wrappers do not: DDP's reducer and FSDP2's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
IGNORED = frozenset(("wait_tensor",))


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
        if func.namespace in NAMESPACES:
            name = func._schema.name.partition("::")[2].rstrip("_")
            if name not in IGNORED:
                self.names.append(name)
                self._note(name, len(self.names))
        return func(*args, **(kwargs or {}))
