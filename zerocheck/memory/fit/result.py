"""Result of a search, as data: `zerocheck memory --fit --json` writes it. Imports no torch."""

from __future__ import annotations

import msgspec

from ...errors import ExitCode
from ..timeline import HeldBytes
from ..verdict import MemoryVerdict, Reserved


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds that the user gave. link: bytes per second of a rank; operations: per second."""

    link: float
    operations: float


class PaperTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step on paper. exposed: of it, those in which nothing computes."""

    step: float
    compute: float
    link: float
    exposed: float


class ChoiceFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a choice: see `choices.Choice`. batch: samples of a microbatch of one rank."""

    implementation: str
    stage: int | None
    wrap: str
    units: bool
    reshard: bool
    checkpoint_activations: bool
    microbatches: int
    batch: int
    replicas: int
    tensor_parallel: int
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    offload: str


class FitRow(ChoiceFields, frozen=True, kw_only=True):
    """Choice that fits.

    smallest: fewest ranks on which it fits; ranks: those of `peak`, `sent` and `calls`: as many as
    the user has, else the smallest; sent: bytes that a rank sends in a step, as simulated, with
    padding; communicated: elements that the ZeRO paper has this stage move per microbatch that is
    reduced, or None for code of which no stage is known; calls: collectives in a step; host: bytes
    of the host that a rank takes where shards are offloaded, with the roundings of pinned memory;
    copied: bytes between device and host in a step; recomputed: share of the forward's operations
    that run again; paper: times of a step, where the speeds are given; reserved: what the caching
    allocator of a GPU would take, of rows that were looked at to find the one to take.
    """

    smallest: int
    ranks: int
    peak: HeldBytes
    sent: float
    communicated: int | None
    calls: int
    host: int
    copied: int
    recomputed: float
    paper: PaperTime | None = None
    reserved: Reserved | None = None
    command: str


class Unfit(ChoiceFields, frozen=True, kw_only=True):
    """Choice that fits on none of the ranks.

    ranks: the most that were tried; by_formula: True if the formula alone excludes it; needs: bytes
    there, by what they are; total: all of them.
    """

    ranks: int
    by_formula: bool
    needs: dict[str, int]
    total: int


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Search over all choices.

    limit: bytes of the device; most_ranks: the bound of the search; given_ranks: True if the user
    set it; inputs: see MemoryReport; rows: by cost; taken: place of the row to take; verdict: on
    that row, None if nothing fits. Of points (a choice on a number of ranks): simulations were
    simulated, by_formula excluded by the formula, by_update by the peak of the optimizer step of
    another choice; advice: sentences, the row to take first; not_tried: what the search leaves out,
    with the reason; assumes: what depends on data; speeds: as given.
    """

    model: str
    elements: int
    blocks: int
    batch: int
    sequence: int
    inputs: tuple[str, ...]
    precision: str
    optimizer: str
    limit: int
    most_ranks: int
    given_ranks: bool
    rows: tuple[FitRow, ...]
    taken: int
    verdict: MemoryVerdict | None
    unfit: tuple[Unfit, ...]
    simulations: int
    by_formula: int
    by_update: int
    advice: tuple[str, ...]
    not_tried: tuple[str, ...]
    assumes: tuple[str, ...]
    speeds: Speeds | None = None

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if something fits, else 1."""
        return ExitCode.HOLDS if self.rows else ExitCode.FAILS
