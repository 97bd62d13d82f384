"""Axes of a job: what each dimension of its device mesh splits, and what follows from that.

The reduced gradient is the sum of the local gradients of all ranks, whatever is split. What a rank
holds, and of which sample its local gradient is, follows from the axes:

- `samples`: a rank has samples of its own; `nothing`: ranks compute the same.
- `sequence`: ranks have parts of the same samples. The first of them computes the local gradient
  of the samples put together, for all of them (whole_samples.py).
- `experts`: a parameter that the wrapper of the model leaves out is a part of a whole: rows of it,
  or some of the numbered modules of a list.
- `parameters`: tensor parallelism, of which a DTensor says itself what each rank holds.
- `layers`: stages of a pipeline. Ranks of a stage hold its layers, and the sum is over them; what
  a stage is called with must be what the one before it returned (verdict/stages.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...compat import flat_parameters
from ...contract.names import unwrapped
from ...contract.shard import Index, Shard
from ...errors import UsageError, unknown
from .call_state import plain_model
from .guard import before_collectives
from .ranks import AllRanks
from .ranks_own import left_out
from .repeatable import Digest, digest
from .zero_engine import zero_engine

Split = Literal["samples", "sequence", "experts", "parameters", "layers", "nothing"]
Order = Literal["contiguous", "zigzag"] | Sequence[int]

_NAMES: Mapping[Split, str] = {
    "samples": "dp fsdp dp_replicate dp_shard replicate shard "
    "efsdp dp_mod_ep dp_shard_mod_ep dp_shard_in_ep",
    "sequence": "cp context sp ulysses ring",
    "experts": "ep expert experts",
    "parameters": "tp etp",
    "layers": "pp pipe pipeline",
}
USUAL = {name: split for split, names in _NAMES.items() for name in names.split()}
"""Split of a dimension of a mesh, by the names that jobs give it."""

OF_ONE_STAGE = (
    "the mesh dimension {!r} goes over the stages of a pipeline, and group= has some of its ranks; "
    "leave out group=, or pass the mesh of one stage"
)


@dataclass(frozen=True)
class SequenceAxis:
    """Split of samples along their sequence, for `attach(axes=)`.

    dim: dimension of the sequence in inputs and outputs of the model. order: "contiguous"; "zigzag"
    where each of n ranks has part r and part 2n - 1 - r of 2n; or the positions in the whole
    sequence of the parts one after the other.

    Raises UsageError for another order.
    """

    dim: int = 1
    order: Order = "contiguous"

    def __post_init__(self) -> None:
        if isinstance(self.order, str) and self.order not in ("contiguous", "zigzag"):
            raise unknown("order of a sequence", self.order, ("contiguous", "zigzag"))

    def whole(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put the parts of all ranks of the axis together."""
        joined = torch.cat([*parts], dim)
        if self.order == "contiguous":
            return joined
        if self.order == "zigzag":
            halves = [half for part in parts for half in _halves(part, dim)]
            return torch.cat([*halves[::2], *halves[1::2][::-1]], dim)
        positions = torch.tensor(self.order)
        if sorted(self.order) != list(range(joined.shape[dim])):
            raise UsageError(
                f"the order of the sequence has {len(self.order)} positions (allowed: each of the "
                f"{joined.shape[dim]} positions of a sequence once)"
            )
        return joined.index_select(dim, positions.argsort())

    def parts(self, whole: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
        """Cut a whole tensor into the parts of all ranks of the axis."""
        if self.order == "contiguous":
            return [*whole.chunk(count, dim)]
        if self.order == "zigzag":
            halves = whole.chunk(2 * count, dim)
            last = 2 * count - 1
            return [torch.cat([halves[n], halves[last - n]], dim) for n in range(count)]
        order = torch.tensor(self.order, device=whole.device)
        return [*whole.index_select(dim, order).chunk(count, dim)]

    @property
    def other(self) -> SequenceAxis:
        """The usual order that is not declared."""
        return replace(self, order="contiguous" if self.order == "zigzag" else "zigzag")


def _halves(part: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = part.shape[dim]
    if size % 2:
        raise UsageError(f"a part of a zigzag sequence has {size} positions (allowed: an even one)")
    return part.narrow(dim, 0, size // 2), part.narrow(dim, size // 2, size // 2)


class Part(NamedTuple):
    """Part of a parameter, along its first dimension, that a rank holds of an axis of experts."""

    name: str
    number: int
    of: int

    def placed(self, shard: Shard) -> Shard:
        """Return a shard of the part as one of the whole."""
        if self.of == 1:
            return replace(shard, name=self.name)
        rows, *others = shard.shape
        index: Index
        if isinstance(shard.index, slice):
            index = self._moved(shard.index, torch.Size(shard.shape).numel())
        else:
            first, *rest = shard.index or (slice(0, size) for size in shard.shape)
            index = (self._moved(first, rows), *rest)
        return replace(shard, name=self.name, shape=(rows * self.of, *others), index=index)

    def _moved(self, inside: slice, size: int) -> slice:
        """Return where a range of the part is in the whole. size: of the part."""
        low, high, _ = inside.indices(size)
        return slice(self.number * size + low, self.number * size + high)


Parts = Mapping[int, Part]
"""By the id of the parameter."""


@dataclass(frozen=True)
class JobAxis:
    """Axis of a mesh, from one rank: numbers of the ranks along it, and its own place."""

    name: str
    split: Split
    ranks: tuple[int, ...]
    place: int
    sequence: SequenceAxis | None = None


@dataclass(frozen=True)
class Axes:
    """Axes of a job that split something else than samples, seen from one rank.

    exchanging: ranks, by their numbers in the world, with which the model may exchange data; alike:
    number of ranks that compute with the same samples; parts: what parameters are a part of; lines:
    ranks along each dimension of a mesh, by its name; whole: ids of parameters of tensor
    parallelism that the reference has in the same shape: all ranks along the axis have them.
    """

    every: tuple[JobAxis, ...] = ()
    exchanging: frozenset[int] = frozenset()
    alike: int = 1
    lines: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    whole: frozenset[int] = frozenset()

    def of(self, split: Split) -> JobAxis | None:
        """Return the axis that splits this, if there is one with several ranks."""
        return next((one for one in self.every if one.split == split), None)

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline, 1 where there is none."""
        axis = self.of("layers")
        return 1 if axis is None else len(axis.ranks)

    @property
    def stage(self) -> int:
        """Number of the stage of this rank, from 0 on."""
        axis = self.of("layers")
        return 0 if axis is None else axis.place

    @property
    def words(self) -> str:
        """Words on what they split, to put after the name of the sharder."""
        return "".join(
            f", {one.split} over {one.name} ({len(one.ranks)} ranks)" for one in self.every
        )


def axes_of(
    mesh: DeviceMesh | Sequence[DeviceMesh] | None,
    given: Mapping[str, Split | SequenceAxis] | None,
    group: dist.ProcessGroup | None,
) -> Axes:
    """Return the axes of these meshes.

    given: what a dimension splits, by its name. Raises UsageError for what is not known or clashes.
    """
    meshes = [mesh] if isinstance(mesh, DeviceMesh) else list(mesh or ())
    for one in meshes:
        if not isinstance(one, DeviceMesh):
            raise UsageError(
                f"mesh= is of type {type(one).__name__} (allowed: a DeviceMesh, or a list of them)"
            )
        if one.mesh_dim_names is None:
            raise UsageError("the dimensions of mesh= have no names (needed: mesh_dim_names=)")
    declared = dict(given or {})
    names = [name for one in meshes for name in one.mesh_dim_names or ()]
    for name in declared:
        if not meshes:
            raise UsageError(
                f"axes= names {name!r}, and no mesh has such a dimension; give the device mesh of "
                "the job with mesh="
            )
        if name not in names:
            raise unknown("mesh dimension", name, names)
    found: list[JobAxis] = []
    exchanging: set[int] = set()
    alike: set[int] = set()
    lines: dict[str, tuple[int, ...]] = {}
    for one in meshes:
        mine = [_axis(one, name, declared, group) for name in one.mesh_dim_names or ()]
        known = {axis.name for axis in found}
        new = (axis for axis in mine if len(axis.ranks) > 1 and axis.name not in known)
        found += [axis for axis in new if axis.split not in ("samples", "nothing")]
        crossed = [axis.name for axis in mine if axis.split not in ("samples", "nothing")]
        exchanging |= _across(one, crossed)
        lines |= {axis.name: axis.ranks for axis in mine if len(axis.ranks) > 1}
        alike |= _across(one, [a.name for a in mine if a.split in ("parameters", "nothing")])
    for split in ("sequence", "experts", "layers"):
        several = [axis.name for axis in found if axis.split == split]
        if len(several) > 1:
            raise UsageError(f"{' and '.join(several)} split {split} (allowed: one axis)")
    return Axes(tuple(found), frozenset(exchanging), max(1, len(alike)), lines=lines)


def _axis(
    mesh: DeviceMesh,
    name: str,
    declared: Mapping[str, Split | SequenceAxis],
    group: dist.ProcessGroup | None,
) -> JobAxis:
    said = declared.get(name, USUAL.get(name))
    if said is None:
        raise UsageError(
            f"what the mesh dimension {name!r} splits is not known from its name; say it with "
            f"axes={{{name!r}: 'samples'}} (allowed: {', '.join(get_args(Split))})"
        )
    sequence = said if isinstance(said, SequenceAxis) else None
    split: Any = "sequence" if sequence is not None else said
    if split not in get_args(Split):
        raise unknown("split of an axis", str(said), get_args(Split))
    if split == "sequence" and sequence is None:
        sequence = SequenceAxis()
    along = dist.get_process_group_ranks(mesh.get_group(name))
    if group is not None:
        if not {*along} <= {*dist.get_process_group_ranks(group)}:
            raise UsageError(OF_ONE_STAGE.format(name))
        along = [dist.get_group_rank(group, rank) for rank in along]
    return JobAxis(name, split, tuple(along), mesh.get_local_rank(name), sequence)


def _across(mesh: DeviceMesh, names: Sequence[str]) -> set[int]:
    """Return the ranks that differ from this one in the dimensions `names` alone."""
    at = mesh.get_coordinate() or ()
    every = zip(mesh.mesh_dim_names or (), at, strict=True)
    where = tuple(slice(None) if name in names else place for name, place in every)
    return set(mesh.mesh[where].flatten().tolist()) if names else set()


def parts_of(
    model: nn.Module,
    axes: Axes,
    reference: Callable[[], Any] | None,
    ranks: AllRanks,
    number: Sequence[int] = (),
) -> dict[int, Part]:
    """Return what parameters are a part of: of experts, and of a model that stages share.

    reference: without it, all that the wrapper leaves out on an axis of experts are parts; number:
    that of the stage, where torch's pipelines give one. Every rank calls this.

    Raises UsageError for a parameter that is none.
    """
    experts = _of_experts(model, axes, reference, ranks)
    if axes.stages == 1:
        return experts
    names = {
        id(one): experts[id(one)].name if id(one) in experts else unwrapped(name)
        for name, one in model.named_parameters()
    }
    every = ranks.gather(msgspec.msgpack.encode((axes.stage, [*names.values()], [*number])))
    of_stages: dict[int, set[str]] = {}
    numbered = True
    for stage, mine, numbers in (msgspec.msgpack.decode(one) for one in every):
        of_stages.setdefault(stage, set()).update(mine)
        numbered &= bool(numbers)
    apart = len(set().union(*of_stages.values())) == sum(map(len, of_stages.values()))
    naming = ranks.broadcast(b"apart" if apart else b"torch" if numbered else b"mesh")
    if naming == b"apart":
        return experts
    if next(iter(flat_parameters(model)), None) is not None or zero_engine(model) is not None:
        raise UsageError(
            "stages of a pipeline in FSDP1 or DeepSpeed have parameters of the same names "
            "(allowed: FSDP2 or DDP, or names that differ); else attach on the ranks of each stage "
            "with group="
        )
    before = f"stage{number[0] if naming == b'torch' else axes.stage}."
    return {
        key: experts.get(key, Part("", 0, 1))._replace(name=before + name)
        for key, name in names.items()
    }


def whole_of(model: nn.Module, axes: Axes, reference: Callable[[], Any] | None) -> frozenset[int]:
    """Return the ids of parameters that tensor parallelism does not split, by the reference."""
    if axes.of("parameters") is None or reference is None:
        return frozenset()
    shapes, named = _shapes_of(reference), model.named_parameters()
    return frozenset(id(one) for n, one in named if shapes.get(unwrapped(n)) == tuple(one.shape))


def _of_experts(
    model: nn.Module, axes: Axes, reference: Callable[[], Any] | None, ranks: AllRanks
) -> dict[int, Part]:
    axis = axes.of("experts")
    if axis is None:
        return {}
    apart = left_out(model, ranks.size // axes.stages)
    named = {
        unwrapped(name): one
        for name, one in model.named_parameters()
        if id(one) in apart and not _knows_its_place(one, axis)
    }
    whole = None if reference is None else _shapes_of(reference)
    found = {}
    alike = {}
    for name, parameter in named.items():
        there = None if whole is None else _renumbered(name, named, whole, axis)
        shape = tuple(parameter.shape)
        if there is not None:  # some of the modules of a list, each of them whole
            found[id(parameter)] = Part(there, 0, 1)
            continue
        if not shape or (whole is not None and whole.get(name) == shape):
            alike[name] = digest([parameter.detach()])
            continue
        count = len(axis.ranks)
        if whole is not None and whole.get(name) != (shape[0] * count, *shape[1:]):
            raise UsageError(
                f"{name} {list(shape)} is no part of a parameter of reference=: on the "
                f"{len(axis.ranks)} ranks of {axis.name} it must have {name} "
                f"{[shape[0] * count, *shape[1:]]}, or that many times as many modules in the list "
                f"(it has: {whole.get(name, 'none')})"
            )
        found[id(parameter)] = Part(name, axis.place, count)
    _check_alike(alike, axes.stage, axis, ranks)
    return found


def _knows_its_place(parameter: torch.Tensor, axis: JobAxis) -> bool:
    """Return True for a DTensor that is distributed over the axis."""
    return isinstance(parameter, DTensor) and axis.name in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def _check_alike(mine: Mapping[str, Digest], stage: int, axis: JobAxis, ranks: AllRanks) -> None:
    """Raise UsageError, on rank 0, unless ranks have the same of what the reference has whole."""
    every = ranks.gather(msgspec.msgpack.encode((stage, mine)))
    known: dict[tuple[int, str], Digest] = {}
    for of_stage, digests in (msgspec.msgpack.decode(one) for one in every):
        for name, found in digests.items():
            if known.setdefault((of_stage, name), found) == found:
                continue
            raise UsageError(
                f"{name} differs between ranks, and reference= has one of the same shape; it must "
                f"be the plain model, with the experts of all {len(axis.ranks)} ranks of "
                f"{axis.name}"
            )


def _shapes_of(reference: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
    named = plain_model(reference, torch.device("cpu")).named_parameters()
    return {unwrapped(name): tuple(one.shape) for name, one in named}


def _renumbered(name: str, mine: Iterable[str], whole: Iterable[str], axis: JobAxis) -> str | None:
    """Return the name in the reference, if a rank has some of its numbered modules."""
    for number in re.finditer(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name):
        before = name[: number.start()]
        here, there = (len(_numbers(before, names)) for names in (mine, whole))
        if there == here * len(axis.ranks) != here:
            at = int(number.group()) + here * axis.place
            return f"{before}{at}{name[number.end() :]}"
    return None


def _numbers(before: str, names: Iterable[str]) -> set[str]:
    """Return the numbers that follow a prefix in names."""
    after = (name[len(before) :].partition(".")[0] for name in names if name.startswith(before))
    return {one for one in after if one.isdigit()}


@contextmanager
def no_collectives() -> Iterator[None]:
    """Raise UsageError where the model of reference= calls a collective.

    Where the first rank of an axis alone calls it, the others would never come.
    """

    def refused(called: str, *_: Any) -> None:
        raise UsageError(
            f"the model of reference= calls {called}: where an axis splits the sequence, it must "
            "be the model that one device runs, on whole sequences"
        )

    with before_collectives(refused):
        yield
