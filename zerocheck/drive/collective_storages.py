"""Storages that collectives gather into and reduce from.

Memory at the end of a phase is attributed by `holders.py`. What comes and goes
within one is known by its use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..compat import Operators
from .collective_trace import kind_of
from .collectives import is_collective
from .holders import address

Use = Literal["gathered", "bucket"]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
COPY_OUT = "fsdp::split_with_sizes_copy"
"""FSDP2 copies what it gathered into memory of each parameter."""


class CollectiveStorages(Operators):
    """Context that calls `note(use, address of the storage)` for each storage of a collective.

    The call comes after the operator has begun.
    """

    def __init__(self, note: Callable[[Use, int], None]) -> None:
        super().__init__()
        self._note = note

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if is_collective(func):
            self._collective(func, args, kwargs, result)
        elif func._schema.name == COPY_OUT:
            self._note_all("gathered", kwargs["out"])
        return result

    def _collective(
        self, func: Any, args: Sequence[Any], given: Mapping[str, Any], out: Any
    ) -> None:
        kind = kind_of(func)
        if kind in REDUCING:
            self._note_all("bucket", (args, given, out))
        elif kind == "all_gather":
            names = [argument.name for argument in func._schema.arguments]
            named = {**dict(zip(names, args, strict=False)), **given}
            put_out = [one for name, one in named.items() if name.startswith("out")]
            self._note_all("gathered", (put_out, out))

    def _note_all(self, use: Use, given: Any) -> None:
        if isinstance(given, torch.Tensor):
            where = address(given)
            if where:
                self._note(use, where)
        elif isinstance(given, Mapping):
            self._note_all(use, list(given.values()))
        elif isinstance(given, list | tuple):
            for one in given:
                self._note_all(use, one)
