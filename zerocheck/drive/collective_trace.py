"""Trace of every collective that this rank calls within the steps, as `protocol.layout.Call`.

One dispatch mode on torch's `c10d` operators, which all of them pass: those of Python, of DDP's
reducer and of FSDP's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..compat import Operators, arguments_of, group_size
from ..protocol.layout import Call, Phase
from .collectives import is_collective, name_of

_KINDS = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("monitored_barrier", "barrier"),
    ("barrier", "barrier"),
    ("send", "send"),
    ("isend", "send"),
    ("recv", "recv"),
    ("irecv", "recv"),
)
"""How the names of operators begin, without a leading underscore, the longer ones first."""


def kind_of(func: Any) -> str:
    """Return the kind of an operator, as `Call.kind`; its own name if it is unknown."""
    name = name_of(func).lstrip("_")
    return next((kind for start, kind in _KINDS if name.startswith(start)), name)


class CallTrace(Operators):
    """Context that collects collectives.

    where(): step and phase in which a call is made, or None for one that is no part of a step: what
    constructors and the harness call is not collected. calls: of this rank, in their order.
    """

    def __init__(self, where: Callable[[], tuple[int, Phase] | None]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._where = where

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_collective(func):
            place = self._where()
            if place is not None:
                self.calls.append(call_of(func, args, kwargs, *place))
        return func(*args, **kwargs)


def call_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], step: int, phase: Phase
) -> Call:
    """Return the record of a call of a `c10d` operator."""
    kind = kind_of(func)
    named = arguments_of(func, args, kwargs)
    ranks = group_size(named)
    put_in = _tensors(named, ("input", "tensor"))
    put_out = _tensors(named, ("output", "out"))
    if kind == "barrier":
        return Call(kind, 0, ranks, "", phase, step)
    if kind in ("all_gather", "gather"):
        # A functional operator returns what it puts out; a rank that gathers nothing has none.
        size = _bytes(put_out) or ranks * _bytes(put_in)
    elif kind == "scatter":
        size = _bytes(put_in) or ranks * _bytes(put_out)
    else:
        size = _bytes(put_in) or _bytes(put_out)
    held = put_in or put_out
    dtype = str(held[0].dtype).removeprefix("torch.") if held else ""
    return Call(kind, size, ranks, dtype, phase, step)


def _tensors(named: Mapping[str, Any], starts: tuple[str, ...]) -> list[torch.Tensor]:
    """Collect all tensors of the arguments whose names start with one of the prefixes."""
    return [one for name, given in named.items() if name.startswith(starts) for one in _flat(given)]


def _flat(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [one for part in given for one in _flat(part)] if isinstance(given, list | tuple) else []


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
