"""Known bugs as weights of local gradients: some count too often, too little, or not at all.

A weight is in units of the right one, so that a table of ones, (ranks, microbatches), is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...case.mesh import AXES, AxisName, Mesh
from ...machine.hosts import Hosts, RankPlace, places

Groups = Mapping[int, Sequence[int]]
"""Ranks whose gradients a rank has, by that rank."""


class ReductionSetting(NamedTuple):
    """Ranks, microbatches, mesh and hosts of a step, on which weights depend."""

    ranks: int
    """Ranks that compute gradients of their own samples."""
    microbatches: int
    mean: bool
    """True if the gradient is the mean over ranks, and not their sum."""
    mesh: Mesh | None = None
    hosts: Hosts = ()
    loss_scale: float | None = None
    """Loss scale of the step, None without one."""
    axes: Mapping[str, int] = MappingProxyType({})
    """Sizes of further axes of a job, by their names, that split sequences or experts."""

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Sizes of the axes of the mesh, by their names."""
        return dict(zip(self.mesh.names, self.mesh.sizes, strict=True)) if self.mesh else {}

    @property
    def ones(self) -> torch.Tensor:
        """Right weights, (ranks, microbatches) in float64."""
        return torch.ones(self.ranks, self.microbatches, dtype=torch.float64)


class KnownWeights(NamedTuple):
    """Weights that a known bug gives."""

    cause: str
    words: str
    on: Callable[[int], torch.Tensor]
    """Weights (ranks, microbatches) of the gradient that a rank holds."""
    alike: bool = False
    """True if they are the same on every rank."""
    joint: str = ""
    """Words of this and of others that give the same, together."""

    @property
    def factor(self) -> float:
        """Weight of every local gradient, where one is that of all; else NaN."""
        weights = self.on(0)
        one = float(weights.reshape(-1)[0])
        return one if self.alike and bool((weights == one).all()) else math.nan


def _along(mesh: Mesh, axis: AxisName) -> Groups:
    """Return the groups of ranks along an axis that the mesh has."""
    return {rank: mesh.group(rank, axis) for rank in range(mesh.world_size)}


def _alike(cause: str, words: str, weights: torch.Tensor) -> KnownWeights:
    return KnownWeights(cause, words, lambda rank: weights, alike=True)


def _in_groups(
    cause: str, words: str, groups: Groups, weights: torch.Tensor, *, each: float | None = None
) -> KnownWeights:
    """Return weights of which a rank has only those of its group's gradients.

    each: what these are multiplied by; None: what makes a mean over the group of a mean over all.
    """

    def on(rank: int) -> torch.Tensor:
        group = list(groups[rank])
        made = torch.zeros_like(weights)
        made[group] = weights[group] * (len(weights) / len(group) if each is None else each)
        return made

    return KnownWeights(cause, words, on)


def of_axes(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients that are too large or too small by the size of an axis."""
    axes, composed = s.axes, s.mesh is not None and s.mesh.parts("activations") > 1
    if s.mesh is not None and len(s.mesh.axes) > 1:
        axes = s.mesh_axes
    for size in dict.fromkeys(axes.values()):
        names = [name for name, its in axes.items() if its == size > 1]
        if size == s.ranks:
            names = [name for name in names if composed and name != "shard"]
        for name in names:
            times, over = (of(axis=name if name in AXES else "axis") for of in bugs.OF_AXES)
            if name == "shard" and s.mesh is not None and s.mesh.data_parallel_size == size:
                times, over = bugs.GRADIENT_TIMES_W, bugs.GRADIENT_OVER_W  # of what reads samples
            for cause, large in ((times, True), (over, False)):
                words, joint = (_of_axis(some, size, large=large) for some in ([name], names))
                weights = s.ones * size if large else s.ones / size
                yield _alike(cause, words, weights)._replace(joint=joint)


def _of_axis(names: Sequence[str], size: int, *, large: bool) -> str:
    """Say which axes of this size a gradient is scaled by; one of them, if there are several."""
    whose = "an axis of the mesh, has" if len(names) == 1 else "axes of the mesh, have"
    whose = f"{' or '.join(names)}, {whose} {size} ranks, and it is"
    if large:
        return f"gradient is {size} times too large: {whose} not divided by them"
    return f"gradient is {size} times too small: {whose} divided by them once too often"


def factors(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients that are a factor too large or too small: ranks, microbatches."""
    world, count = s.ranks, s.microbatches
    rows: list[tuple[str, float, str]] = []
    if world > 1:
        root = math.sqrt(world)
        summed = f"summed over {world} ranks, not averaged"
        averaged = f"averaged over {world} ranks, not summed"
        over_root = f"by the square root of the number of ranks ({world})"
        too_large = summed if s.mean else "multiplied by the number of ranks"
        too_small = "divided by the number of ranks twice" if s.mean else averaged
        rows += [
            (bugs.GRADIENT_TIMES_W, world, f"{world} times too large: {too_large}"),
            (bugs.GRADIENT_OVER_W, 1 / world, f"{world} times too small: {too_small}"),
            (bugs.GRADIENT_TIMES_ROOT_W, root, f"{root:.4g} times too large: {over_root}"),
            (bugs.GRADIENT_OVER_ROOT_W, 1 / root, f"{root:.4g} times too small: {over_root}"),
        ]
    if count > 1:
        summed = f"summed over {count} microbatches, not averaged"
        twice = "divided by the number of microbatches twice"
        rows += [
            (bugs.GRADIENT_TIMES_GA, count, f"{count} times too large: {summed}"),
            (bugs.GRADIENT_OVER_GA, 1 / count, f"{count} times too small: {twice}"),
        ]
    if count > 1 and world > 1:
        both = f"{world} ranks and {count} microbatches"
        words = f"summed over {both}, not averaged" if s.mean else f"multiplied by {both}"
        number = world * count
        rows.append((bugs.GRADIENT_TIMES_W_TIMES_GA, number, f"{number} times too large: {words}"))
    rows.append((bugs.GRADIENT_DOUBLED, 2.0, "2 times too large"))
    for cause, factor, words in rows:
        yield _alike(cause, f"gradient is {words}", s.ones * factor)


def of_loss_scale(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients from which the loss scale was divided out wrongly."""
    scale = s.loss_scale
    if scale is None:
        return
    another, half, double = bugs.UNSCALED_BY_ANOTHER_SCALE, "half of", "twice"
    rows = [
        (another, 0.5, f"{half} what it must be: it was divided by {double} the"),
        (another, 2.0, f"2 times too large: it was divided by {half} the"),
        (bugs.NOT_UNSCALED, scale, f"{scale:g} times too large: it was not divided by the"),
        (bugs.UNSCALED_TWICE, 1 / scale, f"{scale:g} times too small: it was divided twice by the"),
    ]
    for cause, factor, words in rows if scale != 1.0 else rows[:2]:
        yield _alike(cause, f"gradient is {words} loss scale", s.ones * factor)


def of_ranks(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients with a rank counted twice, and those of smaller groups of neighbours.

    Groups: two halves, or of a size that divides W.
    """
    world = s.ranks
    if world == 1:
        return
    for rank in range(world):
        weights = s.ones
        weights[rank] = 2.0
        words = f"the gradient that rank {rank} computed is in the sum twice"
        yield _alike(bugs.RANK_COUNTED_TWICE, words, weights)
    groupings = {tuple(rank * 2 // world for rank in range(world)): None}
    for size in range(2, world):
        if world % size == 0:
            groupings[tuple(rank // size for rank in range(world))] = None
    if s.mesh is not None and s.mesh.has("replicate"):  # replicas have a name of their own
        groupings.pop(tuple(s.mesh.coordinate(rank, "replicate") for rank in range(world)), None)
    for numbers in groupings:
        groups = {
            r: tuple(o for o in range(world) if numbers[o] == numbers[r]) for r in range(world)
        }
        shown = " and ".join(", ".join(map(str, one)) for one in dict.fromkeys(groups.values()))
        words = f"ranks {shown} are reduced apart, and not all {world} together"
        if all(len(one) == 1 for one in groups.values()):
            words = f"each of the {world} ranks is reduced with no other"
        each = None if s.mean else 1.0
        yield _in_groups(bugs.REDUCED_IN_SMALLER_GROUPS, words, groups, s.ones, each=each)


def of_replicas(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients of R replicas of S ranks that are not reduced over an axis."""
    mesh, count = s.mesh, s.microbatches
    if mesh is None or not mesh.has("replicate"):
        return
    replicas, shards = mesh.size("replicate"), mesh.size("shard")
    within, across = _along(mesh, "shard"), _along(mesh, "replicate")
    replica = f"each replica of {shards} ranks has a gradient of its own"
    shard = f"each rank has the sum over its {replicas} replicas"
    for cause, words, axis, groups, missing in (
        (bugs.NOT_REDUCED_OVER_REPLICAS, replica, "replicate", within, replicas),
        (bugs.NOT_REDUCED_OVER_SHARDS, shard, "shard", across, shards),
    ):
        words += f": it was never reduced over the {axis} axis"
        for each, more in (
            (missing if s.mean else 1, ""),
            (1, f", and is divided by {mesh.world_size} all the same"),
        ):
            if missing > 1:
                yield _in_groups(cause, words + more, groups, s.ones, each=each)
    if count == 1 or replicas == 1:
        return
    words = f"only the last of {count} microbatches is reduced over the replicate axis"
    alike = ", and the rest is divided by the number of replicas all the same"
    for before, more in ((replicas if s.mean else 1, ""), (1, alike)):

        def on(rank: int, before: float = before) -> torch.Tensor:
            weights = s.ones * 0
            weights[list(within[rank]), :-1] = before
            weights[:, -1] = 1.0
            return weights

        yield KnownWeights(bugs.LAST_MICROBATCH_ONLY_OVER_REPLICAS, words + more, on)


def of_hosts(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients divided by a host's ranks, or reduced on each host separately.

    None on one host.
    """
    ranks = places(s.hosts, s.ranks)
    if ranks[-1].host == 0:
        return
    yield from _on_hosts(s, ranks, dict.fromkeys(range(s.ranks), range(s.ranks)), "")
    if s.mesh is not None and s.mesh.has("replicate"):
        yield from _on_hosts(s, ranks, _along(s.mesh, "shard"), " over the shard axis")


def _on_hosts(
    s: ReductionSetting, ranks: Sequence[RankPlace], groups: Groups, words: str
) -> Iterator[KnownWeights]:
    """Iterate over bugs in a reduction over groups. Of a sum over ranks nothing is divided."""
    size = len(groups[0])
    if s.mean:
        sizes = ", ".join(str(size) for size in dict.fromkeys(r.local_world_size for r in ranks))
        yield KnownWeights(
            bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST,
            f"the sum{words or ' over ranks'} is divided by the number of ranks on a host "
            f"({sizes}; LOCAL_WORLD_SIZE), and not by {size}",
            lambda rank: s.ones * (size / ranks[rank].local_world_size),
        )
    within = {
        rank: [other for other in groups[rank] if ranks[other].host == place.host]
        for rank, place in enumerate(ranks)
    }
    yield _in_groups(
        bugs.REDUCED_WITHIN_EACH_HOST,
        f"each host reduces the gradients of its own ranks{words}, and nothing is reduced between "
        "hosts",
        within,
        s.ones,
        each=None if s.mean else 1.0,
    )


def local(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients of each rank alone, never reduced."""
    world, count = s.ranks, s.microbatches
    if world == 1:
        return
    own = {rank: (rank,) for rank in range(world)}
    whole = float(world) if s.mean else 1.0
    never = "it was never reduced over ranks"
    yield _in_groups(
        bugs.LOCAL_GRADIENT_ONLY,
        f"each rank holds its own local gradient: {never}",
        own,
        s.ones,
        each=whole,
    )
    yield _in_groups(
        bugs.LOCAL_GRADIENT_OVER_W,
        f"each rank holds its own local gradient, divided by W = {world}: {never}, or the "
        "reduction was not waited for",
        own,
        s.ones,
        each=whole / world,
    )
    if count > 1:
        yield _in_groups(
            bugs.LAST_MICROBATCH_OF_THE_LOCAL_GRADIENT_OVER_W,
            f"each rank holds its own gradient of the last of {count} microbatches, divided by W",
            own,
            _last(s),
            each=whole / world,
        )
        yield _in_groups(
            bugs.LOCAL_GRADIENT_OVER_W_ACCUMULATOR_RESCALED,
            "each rank holds its own local gradient, never reduced over ranks, and each microbatch "
            f"divides the sum of those before it by W = {world} once more",
            own,
            _scaled_again(s, 1 / world),
            each=whole / world,
        )


def _last(s: ReductionSetting) -> torch.Tensor:
    """Weights of the last microbatch alone."""
    weights = s.ones * 0
    weights[:, -1] = 1.0
    return weights


def _scaled_again(s: ReductionSetting, factor: float) -> torch.Tensor:
    """Weights where each further microbatch multiplies the sum by a factor."""
    powers = [factor ** (s.microbatches - 1 - number) for number in range(s.microbatches)]
    return s.ones * torch.tensor(powers, dtype=torch.float64)


def last_microbatch(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients of the last microbatch alone."""
    count = s.microbatches
    words = f"only the last of {count} microbatches counts"
    if count > 1:
        yield _alike(bugs.LAST_MICROBATCH_ONLY, words, _last(s))
        more = f"{words}, and it is not divided by {count}"
        yield _alike(bugs.LAST_MICROBATCH_ONLY_TIMES_GA, more, _last(s) * count)


def of_microbatches(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients with microbatches that are missing, doubled, not reduced or scaled."""
    count = s.microbatches
    for number in range(count):
        weights = s.ones
        weights[:, number] = 2.0
        words = f"microbatch {number} is in the sum twice"
        yield _alike(bugs.MICROBATCH_DOUBLED, words, weights)
    yield from _dropped(s)
    if s.ranks == 1 or count == 1:
        return
    for size in sorted({s.ranks, *s.mesh_axes.values()} - {1}):
        names = ["W"] if size == s.ranks else [n for n, its in s.mesh_axes.items() if its == size]
        by = f"by {' or '.join(names)} once more"
        for verb, factor in (("divides", 1 / size), ("multiplies", size)):
            words = f"each microbatch {verb} the sum of those before it {by}"
            yield _alike(bugs.ACCUMULATOR_RESCALED, words, _scaled_again(s, factor))
    for number in range(count):
        others = [one for one in range(count) if one != number]
        words = f"only microbatch {number} was reduced over ranks"
        yield _own(s, bugs.ONE_MICROBATCH_REDUCED, words, others)
        words = f"microbatch {number} was not reduced over ranks, and the others were"
        yield _own(s, bugs.ONE_MICROBATCH_NOT_REDUCED, words, [number])


def _dropped(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over gradients without a run of microbatches, and of a run of them alone."""
    count, every = s.microbatches, range(s.microbatches)
    runs = [every[start:stop] for start in every for stop in range(start + 1, count + 1)]
    of_one = [run for run in runs if len(run) == 1]
    for missing in dict.fromkeys(
        tuple(run) for run in (*of_one, *runs, *([n for n in every if n not in r] for r in runs))
    ):
        if not missing or (len(missing) == count and count > 1):
            continue
        weights = s.ones
        weights[:, list(missing)] = 0.0
        left = [number for number in every if number not in missing]
        if count > 2 and left == [count - 1]:
            continue  # which has a name of its own
        words = f"microbatch {missing[0]} is missing from the sum"
        if len(missing) > 1:
            several = f"microbatches {', '.join(map(str, missing))} are missing from the sum"
            words = several if len(left) > 1 else f"only microbatch {left[0]} is in the sum"
        yield _alike(bugs.MICROBATCH_DROPPED, words, weights)


def _own(s: ReductionSetting, cause: str, words: str, numbers: Sequence[int]) -> KnownWeights:
    """Return weights where these microbatches are each rank's own."""

    def on(rank: int) -> torch.Tensor:
        weights = s.ones
        weights[:, numbers] = 0.0
        weights[rank, numbers] = float(s.ranks) if s.mean else 1.0
        return weights

    return KnownWeights(cause, words, on)


_OF_ALL_RANKS = (
    bugs.GRADIENT_TIMES_ROOT_W,
    bugs.GRADIENT_OVER_ROOT_W,
    bugs.GRADIENT_TIMES_W,
    bugs.GRADIENT_OVER_W,
    bugs.LOCAL_GRADIENT_OVER_W,
)
"""Causes that say less than the size of an axis does."""


def telling(
    sentences: Mapping[str, str], microbatches: int, joint: Mapping[str, str]
) -> dict[str, str]:
    """Return the sentences to print of causes that coincide: those that add nothing are left out.

    sentences: by cause; joint: by cause, of axes that give the same. A doubled gradient has a
    reason if another cause gives the same, and one microbatch of one is the gradient.
    """
    said = {**sentences, **joint}
    if joint:
        said = {k: words for k, words in said.items() if k in joint or k not in _OF_ALL_RANKS}
    of_one = (bugs.MICROBATCH_DROPPED, bugs.MICROBATCH_DOUBLED) if microbatches == 1 else ()
    for cause in (*of_one, bugs.GRADIENT_DOUBLED):
        if len(said) > 1:
            said.pop(cause, None)
    return said


def every(s: ReductionSetting) -> Iterator[KnownWeights]:
    """Iterate over all of them, and over those without a name that a single slip gives."""
    for kind in (
        of_axes,
        factors,
        of_loss_scale,
        of_ranks,
        of_replicas,
        of_hosts,
        local,
        last_microbatch,
        of_microbatches,
    ):
        yield from kind(s)
    for factor in (0.0, 0.5):
        yield _alike("", "", s.ones * factor)
    for factor in (
        1.0,
        float(s.ranks),
        float(s.ranks * s.microbatches),
    ):  # each rank's own, whatever is divided
        for weights in (s.ones, _last(s)):
            own = {rank: (rank,) for rank in range(s.ranks)}
            yield _in_groups("", "", own, weights, each=factor)
    for cut in range(1, s.ranks):
        halves = (range(cut), range(cut, s.ranks))
        for each in (None, 1.0):
            yield _in_groups(
                "", "", {r: halves[r >= cut] for r in range(s.ranks)}, s.ones, each=each
            )
    for rank in range(s.ranks if s.ranks > 1 else 0):
        weights = s.ones
        weights[rank] = 0.0
        yield _alike("", "", weights)
        for number in range(s.microbatches if s.microbatches > 1 else 0):
            for weight in (0.0, 2.0):
                weights = s.ones
                weights[rank, number] = weight
                yield _alike("", "", weights)
