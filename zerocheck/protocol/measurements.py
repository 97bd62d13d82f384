"""Measurements of a rank's steps: memory and collectives."""

from __future__ import annotations

import msgspec

from .layout import Call, Category, Layout, Line, Peak, Phase

LOCAL = "local variable"
"""Beginning of the holder's name of memory that only a running function holds."""
HARNESS = "batches of the harness"
"""Holder of the samples, which are not the implementation's."""
UNEXPLAINED = "unexplained"
"""Holder of memory that nothing is known to hold."""


class CudaPool(msgspec.Struct, frozen=True, array_like=True):
    """Report of a GPU's caching allocator at the end of a phase, in bytes.

    asked: requested by allocations since the run began; rounding: added to that, up to multiples of
    512 bytes; allocated: `torch.cuda.memory_allocated` since then; reserved, inactive: of the whole
    process, and the unused part of it between blocks.
    """

    step: int
    phase: Phase
    asked: int
    rounding: int
    allocated: int
    reserved: int
    inactive: int

    @property
    def unexplained(self) -> int:
        """Allocated bytes that neither requests nor rounding account for."""
        return self.allocated - self.asked - self.rounding


class Exposed(msgspec.Struct, frozen=True, array_like=True):
    """Shard that a rank exposes, with memory, in the step from which on all are alike.

    phase: backward or step, at whose end it was exposed; storage: bytes of the storage of which it
    is a view; number: of that storage on this rank, equal for shards that share it.
    """

    phase: Phase
    role: str
    name: str
    elements: int
    bytes: int
    storage: int
    number: int


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Allocation that a rank holds when that step is over.

    exposed: a shard is a view of it.
    """

    category: Category
    bytes: int
    holder: str
    exposed: bool


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and collectives of a rank during its steps, with nothing else observed.

    lines: bytes held at the end of each phase of each step, by category and holder; layout:
    prediction of the implementation, or None; calls: the collectives of each step, in the order in
    which they were called; steps: number taken, at least that of the case; stage: declared by the
    implementation, or None; stays_gathered: names of parameters that it declares to keep whole
    though the stage shards them; peaks: the maximum held within each phase of each step, on the
    CPU; pools: on a GPU, at the end of each phase; exposed, held: shards and allocations in the
    first step that is as all after it, the samples of the harness and local variables left out.
    """

    lines: tuple[Line, ...] = ()
    peaks: tuple[Peak, ...] = ()
    layout: Layout | None = None
    calls: tuple[tuple[Call, ...], ...] = ()
    steps: int = 0
    stage: int | None = None
    stays_gathered: tuple[str, ...] = ()
    pools: tuple[CudaPool, ...] = ()
    exposed: tuple[Exposed, ...] = ()
    held: tuple[Held, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """True if it was measured on a GPU."""
        return bool(self.pools)
