"""Result of a simulation, as data: `zerocheck memory --json` writes it."""

from __future__ import annotations

import msgspec

from ..errors import ExitCode
from ..protocol.layout import Category, Line, Phase
from .timeline import HeldBytes
from .verdict import MemoryVerdict, Reserved


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the rank holds between steps, next to the formula of its stage.

    held: parameters, gradients and optimizer states; formula: of the stage, with fp32 weights (with
    AdamW 4 + 4 + 8 bytes per parameter), or None for code of which no stage is known; counts: step
    counts, which the formula leaves out; released: gradients by the formula where the step lets go
    of them, so that none are held; padding: the rest, that is, held - (formula - released) -
    counts, from rounding up, or down on a rank that has less than others. paper: the ZeRO paper's
    mixed precision (2 + 2 + 12), in bytes by `paper_words`, None where the formula is that;
    unlike: what is in fp32 here and not there. copies: bytes of all ranks together if each held
    this, over those of one `copy`; communicated: elements that the paper has this stage move per
    step. bucket and buffer stay too and are in no formula.
    """

    held: int
    formula: float | None
    words: str
    counts: int
    released: float
    padding: float | None
    paper: float | None
    paper_words: str
    unlike: str
    copies: float
    copy: str
    communicated: int | None
    bucket: int
    buffer: int


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the host that one rank takes, where its shards are offloaded.

    peak: of all tensors on the host; taken: bytes at most, with the roundings of pinned memory;
    pinned: of them, those of blocks of pinned memory; rounded: of those, bytes beyond tensors,
    since each block is a power of two; to_device, to_host: bytes copied in the last step.
    """

    peak: HeldBytes
    taken: int
    pinned: int
    rounded: int
    to_device: int
    to_host: int


class ModulePeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak within a module in the last step. module: all blocks have one row, of the highest."""

    phase: Phase
    module: str
    lowest: int
    held: HeldBytes


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated alternative. change: in words; command: to see it all."""

    change: str
    command: str
    verdict: MemoryVerdict

    @property
    def fits(self) -> bool:
        """True if its verdict says so."""
        return self.verdict.fits


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison with the memory of a device.

    over: the first instant whose tensors need more, None if there is none; stages: bytes for each
    stage of the ZeRO paper by the formula, with the activations and temporaries of this run, none
    where shards are offloaded; asks: the lowest of them that fits; tried: alternatives.
    """

    verdict: MemoryVerdict
    over: HeldBytes | None
    stages: dict[int, int]
    asks: int | None
    tried: tuple[Alternative, ...] = ()


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated rank.

    elements: parameters of the model; simulated: numbers of blocks that were simulated, empty if it
    was the whole model; reason: why nothing was extrapolated though there are many blocks;
    left_out: microbatches of a step that were not simulated, since those before are alike; lines:
    bytes at the end of each phase of each step, by category; inputs: shapes of the samples that a
    factory draws, empty for token ids of (batch, sequence); assumes: what depends on data;
    reserved: None where it is not modelled, and `unreserved` says why; offload, host: the kind of
    host memory that has the shards, and what is taken of it, none and None where it has none. The
    rest counts the device, but for `between`, which counts both.
    """

    model: str
    implementation: str
    world_size: int
    replicas: int
    tensor_parallel: int
    expert_parallel: int
    pipeline_parallel: int
    rank: int
    batch: int
    sequence: int
    inputs: tuple[str, ...]
    precision: str
    autocast: bool
    checkpoint_activations: bool
    offload: str
    wrap: str
    command: str
    elements: int
    tensors: int
    blocks: int
    simulated: tuple[int, ...]
    reason: str
    left_out: int
    lines: tuple[Line, ...]
    between: Between
    peak: HeldBytes
    rows: tuple[ModulePeak, ...]
    assumes: tuple[str, ...] = ()
    device: Device | None = None
    reserved: Reserved | None = None
    unreserved: str = ""
    host: HostMemory | None = None

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if the model does not fit, else 0."""
        return ExitCode.HOLDS if self.device is None or self.device.verdict.fits else ExitCode.FAILS

    def at_end(self, phase: Phase, step: int) -> dict[Category, int]:
        """Return the bytes by category at the end of a phase."""
        lines = [line for line in self.lines if (line.phase, line.step) == (phase, step)]
        return {line.category: line.bytes for line in lines}
