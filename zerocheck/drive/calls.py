"""Collects every collective that this rank calls within the steps, as `contract.layout.Call`.

One dispatch mode on torch's `c10d` operators, which all of them pass: those of Python, of DDP's
reducer and of FSDP's backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..compat import comes_first, process_group
from ..contract.layout import Call, Phase
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
    """The kind of an operator, as `Call.kind`; its own name if it is none that we know."""
    name = name_of(func).lstrip("_")
    return next((kind for start, kind in _KINDS if name.startswith(start)), name)


class CallTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, and `at` has said in which phase, it collects calls.

    calls: of this rank, in their order. Before the first `at`, and while `paused`, nothing is
    collected: what constructors and the harness call is no part of a step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._step = -1
        self._phase: Phase | None = None

    def at(self, step: int, phase: Phase | None) -> None:
        """What is called from now on belongs to this phase of this step; None: to no step."""
        self._step, self._phase = step, phase

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called within belongs to no step."""
        before, self._phase = self._phase, None
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if comes_first(types):
            return NotImplemented
        given = dict(kwargs or {})
        if self._phase is not None and is_collective(func):
            self.calls.append(call_of(func, args, given, self._phase, self._step))
        return func(*args, **given)


def call_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], phase: Phase, step: int
) -> Call:
    """What a `c10d` operator is called with."""
    kind = kind_of(func)
    named = {argument.name: one for argument, one in zip(func._schema.arguments, args, strict=False)}
    named.update(kwargs)
    ranks = _ranks(named)
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


def _ranks(named: Mapping[str, Any]) -> int:
    if "group_name" in named:
        return process_group(named["group_name"]).size()
    return process_group(named["process_group"]).size()


def _tensors(named: Mapping[str, Any], starts: tuple[str, ...]) -> list[torch.Tensor]:
    """All tensors of the arguments whose names begin so."""
    return [one for name, given in named.items() if name.startswith(starts) for one in _flat(given)]


def _flat(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [one for part in given for one in _flat(part)] if isinstance(given, list | tuple) else []


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
