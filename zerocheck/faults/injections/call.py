"""Collective as one rank sees it, whichever operator of torch carries it.

Both families are read: `c10d`, whose operators write in place and return a Work, and
`_c10d_functional`, whose operators return new tensors. Everything that is called goes through one
of them, DDP's C++ reducer and FSDP2's backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat import process_group, wait_for_work, work_from_future

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"]

_KINDS: dict[str, Kind] = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "reduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "broadcast_": "broadcast",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "broadcast": "broadcast",
}
"""`reduce_` leaves its result on one rank only; what is changed on the others harms nothing."""

_OPS: Any = dist.ReduceOp.RedOpType
_REDUCE_OPS: dict[int, str] = {int(op): name for name, op in _OPS.__members__.items()}
"""Names of the numbers that operators of `c10d` get."""

_IN_PLACE = frozenset(
    (
        "allreduce_",
        "allreduce_coalesced_",
        "reduce_",
        "broadcast_",
        "all_reduce_",
        "all_reduce_coalesced_",
    )
)
"""Those that overwrite what was put in."""


class CollectiveCall:
    """One collective.

    kind   all-reduce, reduce-scatter, all-gather or broadcast
    given  what this rank puts in, before the call
    got    what it has of it; right once `run` has returned
    local  beside each tensor of `got`, for a reduction: what it would hold had nothing been
           reduced; for a broadcast: what it held before. A copy
    rank, world_size   of the group of the call
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        self._func = func
        self._named = _named(func, args, kwargs or {})
        self.name: str = func._schema.name.partition("::")[2]
        self.kind: Kind = _KINDS[self.name]
        group = process_group(
            self._named["process_group" if "process_group" in self._named else "group_name"]
        )
        self.group: dist.ProcessGroup = group
        self.rank, self.world_size = group.rank(), group.size()
        self.given = _tensors(self._named, _GIVEN)
        self.got = _tensors(self._named, _GOT) or ([] if self.functional else self.given)
        self.local: list[Tensor] = []

    @property
    def sums(self) -> bool:
        """True if the call sums, or averages, floating-point numbers."""
        return self.floating and self._op in ("sum", "avg")

    @property
    def averages(self) -> bool:
        """True if the call itself divides the sum by the number of ranks."""
        return self._op == "avg"

    @property
    def floating(self) -> bool:
        """True if the data are floating-point numbers, and not counts or bytes."""
        return bool(self.given) and all(one.is_floating_point() for one in self.given)

    @property
    def of_scalars(self) -> bool:
        """True if each tensor is 0-d, like a norm."""
        return all(one.dim() == 0 for one in self.given)

    def give(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put in `change(a copy)` of each tensor. The caller's are left alone where it gets others.

        Only before `run`.
        """
        if self.name in _IN_PLACE:
            for one in self.given:
                one.copy_(change(one.clone()))
            return
        for key in _GIVEN:
            if key in self._named:
                self._named[key] = _mapped(lambda one: change(one.clone()), self._named[key])
        self.given = _tensors(self._named, _GIVEN)

    def run(self) -> Any:
        """Run the call and wait for it; return the operator's result."""
        self.local = [one.clone() for one in self.local_of(self.given)]
        result = self.start()
        self.finish(result)
        return result if self.functional else self.done(self.first)

    @staticmethod
    def done(result: Any) -> tuple[Any, Any]:
        """Return a result of `c10d` with a Work that is over.

        The Work of gloo will not do: its reduce-scatter copies the sum to where it belongs in
        `wait`, and does so again each time.
        """
        over: torch.futures.Future[Any] = torch.futures.Future()
        over.set_result([result] if isinstance(result, Tensor) else result)
        return result, work_from_future(over)

    def start(self) -> Any:
        """Start the call without waiting."""
        places, words = [], {}
        for argument in self._func._schema.arguments:
            if argument.kwarg_only:
                words[argument.name] = self._named[argument.name]
            else:
                places.append(self._named[argument.name])
        return self._func(*places, **words)

    def finish(self, result: Any) -> None:
        """Wait for the result of `start`."""
        if self.functional:
            self.got = list(_flat(result))
            for one in self.got:
                torch.ops._c10d_functional.wait_tensor(one)
            return
        wait_for_work(work_of(result))

    def pieces(self) -> list[list[Tensor]]:
        """Return an all-gather's result: per tensor, a view per rank, in the order of ranks."""
        if self.name == "allgather_":
            return [list(one) for one in self._named["output_tensors"]]
        return [list(one.view(-1).chunk(self.world_size)) for one in self.got]

    def everyone(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks: per tensor, one per rank. Communicates."""
        found = []
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(parts, tensor.contiguous(), group=self.group)
            found.append(parts)
        return found

    def local_of(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the value of `local` for other input tensors; `given` as of one rank."""
        if self.kind != "reduce-scatter":
            return list(given)
        if self.name == "reduce_scatter_":
            return list(given[self.rank :: self.world_size])
        return [one.chunk(self.world_size)[self.rank] for one in given]

    @property
    def _op(self) -> str:
        """Operator of a reduction, "sum", "max", ..., or "" for other calls."""
        if self.kind not in ("all-reduce", "reduce-scatter"):
            return ""
        op: Any = self._named["reduce_op"]
        return (op if isinstance(op, str) else _REDUCE_OPS[op.op()]).lower()

    def aside(self) -> list[Tensor]:
        """Let the call work on copies from now on. Return the tensors meant for the result."""
        callers = self.got
        for key in {*_GIVEN, *_GOT} & set(self._named):
            self._named[key] = _mapped(torch.clone, self._named[key])
        self.given = _tensors(self._named, _GIVEN)
        self.got = _tensors(self._named, _GOT)
        return callers

    @property
    def first(self) -> Any:
        """First argument, which operators of `c10d` return with a Work."""
        return next(iter(self._named.values()))

    @property
    def functional(self) -> bool:
        """True if the operator returns new tensors, and no Work."""
        return bool(self._func.namespace == "_c10d_functional")


def call_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> CollectiveCall | None:
    """Return the collective of an operator, or None for any other operator."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    return (
        CollectiveCall(func, args, kwargs)
        if func._schema.name.partition("::")[2] in _KINDS
        else None
    )


def work_of(result: Any) -> Any:
    """Return the Work, boxed for C++, that an operator of `c10d` returned."""
    return result[1] if isinstance(result, tuple | list) else result


_GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
_GOT = ("output_tensor", "output_tensors", "outputs", "out", "tensors")


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by the names of the schema, in its order, defaults included."""
    found = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value
    return found


def _tensors(named: Mapping[str, Any], keys: Sequence[str]) -> list[Tensor]:
    return [one for key in keys if key in named for one in _flat(named[key])]


def _flat(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for part in given for one in _flat(part)]


def _mapped(change: Callable[[Tensor], Tensor], given: Any) -> Any:
    if isinstance(given, Tensor):
        return change(given)
    return [_mapped(change, part) for part in given]
