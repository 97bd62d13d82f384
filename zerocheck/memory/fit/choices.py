"""Choices that are tried: implementation, units, resharding, checkpointing, microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...catalogue import BY_STAGE
from ...contract.loading import load
from ..setup import Setup, Wrap

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


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train the model, on any number of ranks.

    microbatches: the samples of a step in so many microbatches, accumulated.
    """

    implementation: str
    wrap: Wrap
    reshard: bool
    checkpoint: bool
    microbatches: int

    def setup(self, base: Setup, ranks: int) -> Setup:
        """Return the simulation of this choice; each step has the samples that `base` has."""
        return replace(
            base,
            implementation=self.implementation,
            world_size=ranks,
            wrap=self.wrap,
            reshard=self.reshard,
            checkpoint=self.checkpoint,
            batch=base.batch * base.microbatches // self.microbatches,
            microbatches=self.microbatches,
        )

    def replaces(self, other: Choice) -> bool:
        """Return True if `other` is this choice with more recomputation, smaller units or batches.

        Where both fit, nobody takes the other.
        """
        one, its = self._burden(), other._burden()
        same = (self.implementation, self.reshard) == (other.implementation, other.reshard)
        return same and one != its and all(a <= b for a, b in zip(one, its, strict=True))

    def _burden(self) -> tuple[bool, bool, int]:
        return self.checkpoint, self.wrap == "layer", self.microbatches


def options_of(implementation: str) -> tuple[str, ...]:
    """Return the options of sharding that an implementation declares to obey."""
    return tuple(load(implementation).options or ())


def searched(base: Setup) -> list[str]:
    """Return the implementations of a search, by stage."""
    matrices = base.optimizer in OF_MATRICES
    return [name for stage, name in BY_STAGE.items() if not (matrices and stage in (1, 2))]


def choices(base: Setup, given: Restriction, *, blocks: bool) -> Iterator[Choice]:
    """Yield all choices, simple ones first. blocks: the model has blocks to checkpoint."""
    samples = base.batch * base.microbatches
    names = [given.implementation] if given.implementation else searched(base)
    for name in names:
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
        parts = [n for n in range(1, samples + 1) if samples % n == 0]
        if given.microbatches is not None:
            parts = [given.microbatches]
        for reshard in reshards:
            for microbatches in parts:
                for wrap in wraps if reshard else wraps[:1]:
                    for checkpoint in again:
                        yield Choice(name, wrap, reshard, checkpoint, microbatches)
