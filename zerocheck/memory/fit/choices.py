"""Choices that are tried: implementation, units, resharding, checkpointing, batches, meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ...adapters.shared.simulation import traits_of
from ...case.schema import OffloadKind
from ...catalogue import BY_STAGE
from ...contract.loading import load
from ..setup import NO_SIZES, AxisSizes, Setup, Wrap, has_axis

SEARCHED_WRAPS: tuple[Wrap, ...] = ("block", "layer")
"""Units of the search, larger ones first."""


OF_MATRICES = ("muon",)
"""Optimizers that need whole matrices. Stages 1 and 2 give each to one rank, in flat buffers of
equal shards: these are as long as the largest matrix, on any number of ranks. No choice for a
large model, so they are not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Options that the user gave: they are kept, and not searched. None: searched."""

    implementation: str | None = None
    wrap: Wrap | None = None
    checkpoint: bool | None = None
    reshard: bool | None = None
    microbatches: int | None = None
    replicas: int | None = None
    tensor_parallel: int | None = None
    expert_parallel: int | None = None
    pipeline_parallel: int | None = None
    offload: OffloadKind | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train the model, on any number of ranks.

    microbatches: the samples of a step in so many microbatches, accumulated; axes: sizes of those
    among which ranks are divided, next to full sharding; offload: kind of host memory that has the
    shards.
    """

    implementation: str
    wrap: Wrap
    reshard: bool
    checkpoint: bool
    microbatches: int
    axes: AxisSizes = NO_SIZES
    offload: OffloadKind = "none"

    def setup(self, base: Setup, ranks: int) -> Setup:
        """Return the simulation of this choice; each step has the samples that `base` has."""
        return replace(
            base,
            implementation=self.implementation,
            world_size=ranks,
            wrap=self.wrap,
            reshard=self.reshard,
            checkpoint=self.checkpoint,
            batch=samples_of_ranks(base, self.axes) // self.microbatches,
            microbatches=self.microbatches,
            offload=self.offload,
            **self.axes._asdict(),
        )

    def runs_on(self, ranks: int) -> bool:
        """Return True if so many ranks can be divided so: replicas are of two ranks or more."""
        replicas, *inner = self.axes
        if ranks % prod(inner):
            return False
        return replicas == 1 or (ranks % replicas == 0 and ranks >= 2 * replicas)

    def replaces(self, other: Choice) -> bool:
        """Return True if `other` is this choice with more recomputation, smaller units or batches.

        Where both fit, nobody takes the other.
        """
        one, its = self._burden(), other._burden()
        same = self._kind() == other._kind()
        return same and one != its and all(a <= b for a, b in zip(one, its, strict=True))

    def _kind(self) -> tuple[str, bool, AxisSizes, OffloadKind]:
        return self.implementation, self.reshard, self.axes, self.offload

    def _burden(self) -> tuple[bool, bool, int]:
        return self.checkpoint, self.wrap == "layer", self.microbatches


def samples_of_ranks(base: Setup, axes: AxisSizes) -> int:
    """Return the samples of a step of ranks that read the same: so many times those of a rank."""
    return base.batch * base.microbatches * axes.tensor_parallel * axes.pipeline_parallel


def options_of(implementation: str) -> tuple[str, ...]:
    """Return the options of sharding that an implementation declares to obey."""
    return tuple(load(implementation).options or ())


def meshes(implementation: str, ranks: int, given: int | None) -> tuple[int, ...]:
    """Return the numbers of replicas that are tried on so many ranks, those with most first.

    ranks: 0 where the number is not known. HSDP needs as many ranks as sharding over all N of them,
    or more, so it is of use where ranks are given. R replicas of S ranks send (S - 1)/S of Psi for
    each gather and reduce-scatter of the stage, and 2 (R - 1)/(R S) to reduce over replicas. With
    stages 1 and 2, which gather and reduce once, that is 2 (N - 1)/N for all R, so they are not
    tried. With stage 3, which gathers twice, it falls with R in fp32; where gathers are in bf16 it
    is the same for all R, or more where units stay gathered.
    """
    kind = load(implementation)
    if "replicate" not in kind.axes:
        return (1,) if given in (None, 1) else ()
    if given is not None:
        return (given,)
    if kind.stage in (0, 1, 2):
        return (1,)
    powers = [1 << power for power in range(1, ranks.bit_length()) if ranks >> power >= 2]
    return (*(one for one in reversed(powers) if ranks % one == 0), 1)


def searched(base: Setup) -> list[str]:
    """Return the implementations of a search, by stage."""
    matrices = base.optimizer in OF_MATRICES
    return [name for stage, name in BY_STAGE.items() if not (matrices and stage in (1, 2))]


def choices(
    base: Setup, given: Restriction, *, blocks: bool, ranks: int = 0, own: bool = False
) -> Iterator[Choice]:
    """Yield all choices, simple ones first.

    blocks: the model has blocks to checkpoint; ranks: as many as the user has, 0 if not given; own:
    the factory draws the samples of a microbatch, always as many.
    """
    given_axes = AxisSizes(*(getattr(given, field) or 1 for field in AxisSizes._fields))
    inner, offload = given_axes._replace(replicas=1), given.offload or "none"
    elementwise = base.optimizer not in OF_MATRICES
    samples = samples_of_ranks(base, inner)
    names = [given.implementation] if given.implementation else searched(base)
    for name in names:
        fields = [field for field, size in inner._asdict().items() if size > 1]
        if not all(has_axis(name, field) for field in fields):
            continue
        if offload != "none" and not (traits_of(load(name)).offload and elementwise):
            continue
        obeyed = options_of(name)
        wraps: tuple[Wrap, ...] = (given.wrap or "block",)
        if given.wrap is None and "wrap" in obeyed:
            wraps = SEARCHED_WRAPS
        reshards = (True, False) if "reshard" in obeyed else (True,)
        if given.reshard is not None:
            reshards = (given.reshard,)
        again = (False, True) if blocks else (False,)
        if given.checkpoint is not None:
            again = (given.checkpoint,)
        least = inner.pipeline_parallel
        parts = [samples] if own else [n for n in range(least, samples + 1) if samples % n == 0]
        if given.microbatches is not None:
            parts = [given.microbatches]
        replicas = (1,) if fields else meshes(name, ranks, given.replicas)
        for reshard, microbatches, wrap, checkpoint, copies in product(
            reshards, parts, wraps, again, replicas
        ):
            if reshard or wrap == wraps[0]:
                axes = inner._replace(replicas=copies)
                yield Choice(name, wrap, reshard, checkpoint, microbatches, axes, offload)
