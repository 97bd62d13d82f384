"""Known causes of a wrong norm or a wrongly clipped gradient, each computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...causes.registry import said
from ...floating_point import Enclosure, Format, U
from ...protocol.verdicts import Explanation
from .. import bounds
from ..compare import compare
from ..layout import Formats
from ..pieces import split
from .unwritten import unwritten


class Norm(NamedTuple):
    """Reported norm that is wrong on one rank.

    shards: the gradient as each rank holds it, its own elements only; rank: which it is; complete:
    whether these are all; previous: the norm reported at the step before; relative, floor: of the
    bound; by_dtype: the elements of each dtype; loss_scale: that of the step; replicas: ranks on
    the replicate axis of a mesh of two axes.
    """

    reported: float
    exact: float
    whole: torch.Tensor
    shards: Sequence[torch.Tensor]
    rank: int
    complete: bool
    previous: float | None
    relative: float
    floor: float
    by_dtype: Mapping[str, torch.Tensor]
    loss_scale: float = 1.0
    replicas: int = 1
    by_tensor: Mapping[str, float] = MappingProxyType({})
    """Norm of the gradient of each parameter."""
    groups: Mapping[str, frozenset[str]] = MappingProxyType({})
    """Names of parameters that may be left out together, in words."""
    along: Sequence[tuple[str, Sequence[float], int]] = ()
    """Axis, norms of what the ranks at each place along it hold, and the rank's place."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.shards)


def norm_causes(norms: Sequence[Norm], kind: str) -> tuple[str, ...]:
    """Find causes whose norm, within the same bound, is the reported one on every wrong rank.

    kind: "2" or "inf". Parameters that are left out are asked for where nothing else explains it,
    since the norm of one shard may be that of all parameters but some.
    """
    if all(_left_out_group(norm, kind) for norm in norms):
        return (bugs.NORM_WITHOUT_SOME_PARAMETERS,)
    found = [_causes_of(norm, kind) for norm in norms]
    common = tuple(cause for cause in found[0] if all(cause in causes for causes in found))
    if not common and all(left_out(norm, kind) for norm in norms):
        return (bugs.NORM_WITHOUT_SOME_PARAMETERS,)
    return common


def norm_explanation(norms: Sequence[Norm], kind: str) -> Explanation:
    """Return what is wrong with reported norms, in the numbers of the first."""
    first = norms[0]
    causes = norm_causes(norms, kind)
    return Explanation.of(
        causes,
        {cause: sentence_of(cause, first, kind) for cause in causes},
        f"the reported norm is {first.reported:.9g}, the norm of the gradient is {first.exact:.9g}",
    )


def _causes_of(norm: Norm, kind: str) -> tuple[str, ...]:
    if math.isnan(norm.reported):
        return unwritten("").causes
    return tuple(dict.fromkeys(n for n, value, _ in _norms(norm, kind) if _near(norm, value)))


def left_out(norm: Norm, kind: str) -> tuple[str, ...]:
    """Return the parameter or modules without which the norm is the reported one, or nothing.

    Tried: each parameter, each module, and several modules of one list, such as experts.
    """
    if math.isnan(norm.reported):
        return ()
    sets = ((names, within(names, norm.by_tensor)) for names in sets_of_paths(norm.by_tensor))
    tried = (names for names, gone in sets if _is_without(gone, norm, kind))
    return _left_out_group(norm, kind) or next(tried, ())


def _left_out_group(norm: Norm, kind: str) -> tuple[str, ...]:
    if math.isnan(norm.reported):
        return ()
    tried = ((words,) for words, gone in norm.groups.items() if _is_without(gone, norm, kind))
    return next(tried, ())


def _is_without(gone: Collection[str], norm: Norm, kind: str) -> bool:
    rest = [value for name, value in norm.by_tensor.items() if name not in gone]
    return bool(rest) and _near(norm, norm_together(rest, kind))


def norm_together(norms: Iterable[float], kind: str) -> float:
    """Return the norm of all parts, given that of each."""
    return max(norms, default=0.0) if kind == "inf" else math.hypot(*norms)


AT_ONCE = 8
"""Modules of a list of which several are tried at once: up to 2^8 sets of them."""


def within(paths: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Return the parameters that these paths name, or that are of a module that they name."""
    paths = tuple(paths)
    return frozenset(
        name for name in names if any(name == one or name.startswith(f"{one}.") for one in paths)
    )


def sets_of_paths(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Iterate over parameters, modules, and several modules of one list, single ones first."""
    names = tuple(names)
    parts = [name.split(".") for name in names]
    modules = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p)))
    yield from ((name,) for name in (*names, *modules))
    lists: dict[str, list[str]] = {}
    for module in modules:
        above, _, last = module.rpartition(".")
        if last.isdigit():
            lists.setdefault(above, []).append(module)
    for members in lists.values():
        if len(members) <= AT_ONCE:
            for count in range(2, len(members)):
                yield from combinations(members, count)


def sentence_of(cause: str, norm: Norm, kind: str) -> str:
    """Return a cause of this norm in words; an empty text if it has none."""
    if cause == bugs.NORM_WITHOUT_SOME_PARAMETERS:
        return f"it is the norm without those of {', '.join(left_out(norm, kind))}"
    axes = (
        axis for name, value, axis in _norms(norm, kind) if name == cause and _near(norm, value)
    )
    axis = next(axes, "")
    along = {
        "part": f"this rank's part along {axis}" if axis else "this rank's own shard",
        "parts": f"the parts along {axis}" if axis else "the ranks' shards",
        "several": f"several ranks along {axis}" if axis else "several ranks",
    }
    return said((cause,), world=norm.world_size, replicas=norm.replicas, **along).get(cause, "")


def _norms(norm: Norm, kind: str) -> Iterator[tuple[str, float, str]]:
    """Iterate over a cause, its norm, and the axis that it is about, if it is one."""
    for axis, parts, place in norm.along:
        yield from ((cause, value, axis) for cause, value in _of_parts(parts, place, kind))
    yield from ((cause, value, "") for cause, value in _of_all(norm, kind))


def _of_parts(parts: Sequence[float], place: int, kind: str) -> Iterator[tuple[str, float]]:
    yield bugs.LOCAL_NORM, parts[place]
    yield bugs.SUM_OF_LOCAL_NORMS, sum(parts)
    yield bugs.MEAN_OF_LOCAL_NORMS, sum(parts) / len(parts)
    yield bugs.LARGEST_LOCAL_NORM, max(parts)
    if kind == "2":
        yield bugs.COPIES_IN_THE_NORM, math.hypot(*parts)


def _of_all(norm: Norm, kind: str) -> Iterator[tuple[str, float]]:
    root = math.sqrt(norm.world_size)
    if norm.replicas > 1:
        yield bugs.NORM_TIMES_ROOT_R, norm.exact * math.sqrt(norm.replicas)
    if norm.world_size > 1:
        yield bugs.NORM_TIMES_ROOT_W, norm.exact * root
        yield bugs.NORM_OVER_ROOT_W, norm.exact / root
        yield bugs.NORM_TIMES_W, norm.exact * norm.world_size
        if not norm.complete:
            local = [_norm_of(shard, kind) for shard in norm.shards]
            yield from _of_parts(local, norm.rank, kind)
    yield bugs.ANOTHER_NORM, _norm_of(norm.whole, "2" if kind == "inf" else "inf")
    yield bugs.NORM_WITHOUT_ROOT, norm.exact**2
    yield bugs.NORM_OF_NOTHING, 0.0
    if len(norm.by_dtype) > 1:
        for elements in norm.by_dtype.values():
            yield bugs.NORM_OF_ONE_DTYPE, _norm_of(elements, kind)
    if norm.loss_scale != 1.0:
        yield bugs.NORM_BEFORE_UNSCALING, norm.exact * norm.loss_scale
    if norm.previous is not None:
        yield bugs.NORM_OF_ANOTHER_STEP, norm.previous


def _near(norm: Norm, value: float) -> bool:
    """Return True if a value is within a norm's bound, two roundings of a factor, and a sum's."""
    roundings = 4 + norm.world_size
    return abs(norm.reported - value) <= (norm.relative + roundings * U) * value + norm.floor


def _norm_of(elements: torch.Tensor, kind: str) -> float:
    if not elements.numel():
        return 0.0
    if kind == "inf":
        return float(elements.abs().max())
    return float(torch.linalg.vector_norm(elements, dtype=torch.float64))


def clip_causes(
    part: torch.Tensor,
    before: torch.Tensor,
    norm: float,
    factor: float,
    max_norm: float,
    formats: Formats,
    outside: torch.Tensor,
    local: tuple[float, float] | None = None,
) -> Explanation:
    """Return what is wrong with a clipped gradient.

    before: what was clipped; norm: the reported one; factor: what it should be multiplied by;
    outside: mask of what is wrong; local: coefficient of the norm of the rank's own shard, and how
    far that norm can be off, relative. Tensors of a dtype in which nothing is wrong say nothing.
    """
    if bool(part.isnan().any()):
        return unwritten("the clipped gradient holds NaN")
    words_of_dtype = ""
    if len(formats.parts) > 1:
        wrong = [(format, e) for format, e in formats.parts if bool(outside[e].any())]
        if len(wrong) == 1:
            format, elements = wrong[0]
            part, before = part[elements], before[elements]
            formats = Formats(((format, None),), len(part))
            words_of_dtype = f", where it is {str(format.dtype).removeprefix('torch.')}"
    raw = max_norm / (norm + 1e-6)
    candidates = {
        bugs.NOT_CLIPPED: (1.0, "the gradient was not clipped"),
        bugs.COEFFICIENT_ABOVE_1: (raw, f"the gradient was scaled up, by {raw:.6g}"),
        bugs.CLIPPED_TWICE: (factor**2, "the gradient was multiplied by the coefficient twice"),
        bugs.COEFFICIENT_INVERTED: (1 / raw, f"the gradient was multiplied by 1 / {raw:.6g}"),
        bugs.GRADIENT_ZERO: (0.0, "the gradient is zero"),
    }
    found = {
        name: words + words_of_dtype
        for name, (value, words) in candidates.items()
        if value != factor and math.isfinite(value) and _is(part, before, value, formats)
    }
    if local is not None and _is(part, before, local[0], formats, local[1]):
        found[bugs.CLIPPED_BY_THE_LOCAL_NORM] = (
            f"the gradient was multiplied by {local[0]:.6g}, the coefficient of the norm of this "
            f"rank's own shard{words_of_dtype}"
        )
    if found:
        return Explanation.of(found, found)
    return Explanation(
        "the clipped gradient is not the gradient times the coefficient of its norm and "
        f"c = {max_norm:g}"
    )


def _is(
    part: torch.Tensor, before: torch.Tensor, factor: float, formats: Formats, relative: float = 0.0
) -> bool:
    """Return True if two products agree within twice the bound of one. relative: of the factor."""

    def clipped(before: torch.Tensor, format: Format) -> Enclosure:
        return bounds.clipped(before, factor, format, all_narrow=format.narrow)

    for here in split(len(part)):
        exact, bound = formats.at(here).enclose(clipped, before[here].to(torch.float64))
        enclosure = Enclosure(exact, 2 * bound + relative * exact.abs())
        if compare(part[here], enclosure)[1] is not None:
            return False
    return True
