"""Unit of ZeRO-3: a module whose parameters are gathered for its calls, and the order of calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...compat import all_gather_single, wait
from ...contract import Shard
from ..shared.units import unit_modules
from .flat import Named, ShardedBuffer, alike, needs_whole
from .precision import compute_dtype, gradient_dtype
from .reduction import Reduction

U = TypeVar("U")


class FlatUnit(NamedTuple):
    """Parameters that become one flat parameter."""

    name: str
    named: Named
    learns: bool


class FlatParameter(ShardedBuffer):
    """Parameters that are gathered and released together; all of them train, or none.

    The storage of `full` has 0 bytes while they are released, and `local` is memory of its own. The
    nn.Parameters are views of `full` for good. Gathering gives the storage its memory back and
    fills it, so whatever autograd saved of them in the forward is right again in the backward.
    Their version counters do not count this, as `full` has one of its own.
    """

    def __init__(self, part: FlatUnit, group: dist.ProcessGroup, case: Case) -> None:
        dtype = gradient_dtype(case, part.named[0][1])
        whole = needs_whole(part.named, case)
        super().__init__(
            part.name, part.named, group, compute_dtype(case), learns=part.learns, whole=whole
        )
        if part.learns:
            self.gradient = torch.zeros_like(self.shard, dtype=dtype)
        self.storage = self.full.untyped_storage()
        self._bytes = self.storage.nbytes()
        self._work: dist.Work | None = None
        self.gathered = True
        self.release()

    def _keep(self) -> torch.Tensor:
        return self.full[self.mine].clone()

    @property
    def reduces(self) -> bool:
        """True if the parameters train now."""
        return self.gradient is not None and self.parameters[0].requires_grad

    def gather(self) -> None:
        """Launch the all-gather, unless the parameters are there already or on their way."""
        if not self.gathered:
            self.storage.resize_(self._bytes)
            self._work = self.fill()
            self.gathered = True

    def fill(self) -> dist.Work | None:
        """Launch the all-gather of the shards."""
        return all_gather_single(self.full, self.local, self.group)

    def wait(self) -> None:
        """Wait until the gathered parameters can be read."""
        wait(self._work)
        self._work = None

    def release(self) -> None:
        """Give back the memory of the gathered parameters."""
        if self.gathered:
            self.wait()
            self.storage.resize_(0)
            self.gathered = False

    def reduce(self, reduction: Reduction) -> None:
        """Launch the reduce-scatter of the local gradients, and let go of them.

        A parameter that the forward did not use counts as 0, and so does padding.
        """
        if self.gradient is None or not self.reduces:
            return
        reduction.make_room()
        whole = self.gradient.new_zeros(self.partition.numel)
        for parameter, view in zip(self.parameters, self.views(whole), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        reduction.launch(whole, self.mine, self.gradient)

    def shards(self) -> Iterator[Shard]:
        """Iterate over the owned slices of the parameters, their masters, and the padding."""
        yield from super().shards()
        yield from self._slices("parameter", self.local)
        start = self.mine.start
        for gap in self.partition.padding(start, self.mine.stop):
            held = self.local[gap.start - start : gap.stop - start]
            yield Shard(self.name, "padding", held, (self.partition.numel,), gap)
            if self.shard is not self.local and not self.pieces:  # masters of padding alone
                held = self.shard[gap.start - start : gap.stop - start]
                yield Shard(self.name, "padding", held, (self.partition.numel,), gap)

    def close(self) -> None:
        """Drop everything. The nn.Parameters become empty, since their memory is gone."""
        super().close()
        self._work = None
        for parameter in self.parameters:
            parameter.data = self.shard.new_empty(0)
        self.parameters.clear()


class Unit:
    """Module with its flat parameters: for each dtype one that trains, and one of the rest."""

    def __init__(self, module: nn.Module, flats: Iterable[FlatParameter]) -> None:
        self.module = module
        self.flats = list(flats)

    @property
    def gathered(self) -> bool:
        """True if the parameters are gathered, or on their way."""
        return any(flat.gathered for flat in self.flats)

    def gather(self) -> None:
        """Launch the all-gathers, unless that is done."""
        for flat in self.flats:
            flat.gather()

    def wait(self) -> None:
        """Wait until the parameters can be read."""
        for flat in self.flats:
            flat.wait()

    def release(self) -> None:
        """Give back the memory of the gathered parameters."""
        for flat in self.flats:
            flat.release()

    def reduce(self, reduction: Reduction) -> None:
        """Launch the reduce-scatters of the local gradients."""
        for flat in self.flats:
            flat.reduce(reduction)


def units_of(model: nn.Module, case: Case, group: dist.ProcessGroup) -> list[Unit]:
    """Make a unit for each module that the case wraps, and last the root unit for the rest."""
    modules = unit_modules(model, case.sharding)
    return [
        Unit(module, [FlatParameter(part, group, case) for part in parts])
        for module, parts in zip((*modules, model), unit_parts(model, case, modules), strict=True)
    ]


def unit_parts(model: nn.Module, case: Case, modules: Sequence[nn.Module]) -> list[list[FlatUnit]]:
    """Return the flat parameters of each unit, and of the root unit, which is the last."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    paths = {module: path for path, module in model.named_modules()}
    units = [(paths[m], [(names.pop(p), p) for p in list(m.parameters())]) for m in modules]
    units.append(("root", [(name, p) for p, name in names.items()]))
    later = unfrozen(case)
    found = []
    for path, named in units:
        trainable = [pair for pair in named if pair[1].requires_grad]
        frozen = [pair for pair in named if not pair[1].requires_grad]
        found.append(
            [
                FlatUnit(name, part, half is trainable or part[0][0] in later)
                for name, half in ((path, trainable), (f"{path}.frozen", frozen))
                for part in alike(half, case)
            ]
        )
    return found


class CallOrder(Generic[U]):
    """Calls of units in one forward, numbered from 0; units of a few next calls are prefetched."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.calls: list[U] = []
        self._expected: list[U] = []  # the calls of the forward before
        self._open: list[int] = []  # numbers of the calls whose backward is not over

    def start(self) -> None:
        """Begin a forward, which is expected to repeat the last one."""
        self._expected, self.calls, self._open = self.calls, [], []

    def enter(self, unit: U) -> list[U]:
        """Record a call; return the units of the calls expected next."""
        self._open.append(len(self.calls))
        self.calls.append(unit)
        return self.ahead()

    def ahead(self) -> list[U]:
        """Return the units of the calls expected after the last one, as in the last forward."""
        number = len(self.calls) - 1
        if self._expected[number : number + 1] != self.calls[number:]:
            return []
        return self._expected[number + 1 : number + 1 + self.prefetch]

    def is_open(self, number: int) -> bool:
        """Return True if neither call `number` nor one before it was reached in the backward."""
        return bool(self._open) and number <= self._open[-1]

    def behind(self, number: int) -> list[U]:
        """Return the units whose backward is next: that of call `number`, and of calls before."""
        return self.calls[max(0, number - self.prefetch) : number + 1][::-1]

    def close(self, number: int) -> Iterator[tuple[U, bool]]:
        """Close the calls after `number`, last first; iterate over (unit, its backward is over)."""
        while self._open and self._open[-1] > number:
            last = self._open.pop()
            unit = self.calls[last]
            yield unit, last == self.calls.index(unit)
