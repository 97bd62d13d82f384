"""Records of the metrics of a job, one to a line of `metrics.jsonl`."""

from __future__ import annotations

import msgspec


class StepSeconds(msgspec.Struct, frozen=True, tag="step", tag_field="kind"):
    """Time of a step on rank 0.

    seconds: of the step; between: from the end of the step before it, where data is loaded;
    measured: whether zerocheck observes more in it, which takes time: seconds is then longer.
    """

    step: int
    seconds: float
    between: float | None = None
    measured: bool = False


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank, in bytes.

    parameters: of its shards; gradients: of what is trained of them, whether or not they are there;
    states: of the optimizer, and masters that it updates in their place; activations: what the
    forwards made and the backward needs, at its first operator; allocated, reserved, peak: of the
    accelerator's allocator, the last since the process began, None without one; resident: of the
    process, None where the system does not say.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    resident: int | None = None


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the model.

    layers: modules with parameters of their own; tensors: trained parameters; gathered: bytes of
    all parameters in the narrowest dtype in which they are gathered; largest: those of the largest
    layer; sharded: whether ranks hold shards of parameters; offloaded: whether parameters are on
    the CPU and the forward is not; compiled: whether torch.compile has a part of it.
    """

    layers: int = 0
    tensors: int = 0
    gathered: int = 0
    largest: int = 0
    sharded: bool = False
    offloaded: bool = False
    compiled: bool = False


class CollectiveTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of one rank in a collective, in ns of the clock of `StepTimes`.

    kind, bytes, ranks: as of `protocol.layout.Call`; root: rank within the group, -1 without one;
    begun: its operator was called; returned: the operator gave the caller the Work; stalled: since
    when the caller had called no operator when the collective was over, not before `returned`, and
    the same as `over` if it was within an operator; over: the Work was complete.
    """

    kind: str
    bytes: int
    ranks: int
    root: int
    begun: int
    returned: int
    stalled: int
    over: int


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of one step of one rank.

    began, ended: of the step, ns; forward: ns within forwards, all microbatches together; reduced:
    when the first `optimizer.step` was called, 0 if none was; copied: ns in operators that copy
    between devices; calls: in their order; clock: which CLOCK_MONOTONIC, the same for ranks whose
    times can be compared.
    """

    began: int
    ended: int
    forward: int = 0
    reduced: int = 0
    copied: int = 0
    calls: tuple[CollectiveTimes, ...] = ()
    clock: str = ""


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one rank: times of a step, and the memory of the next one that is not checked.

    tokens: integers that the model was called with, 0 where they are none; microbatches: calls of
    the model.
    """

    timed: StepTimes
    tokens: int = 0
    microbatches: int = 0
    memory: RankMemory = RankMemory()


class CollectiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind in a step.

    calls: of one rank; bytes: of a call, the median; largest: bytes of the largest; waited: share
    of the step that callers wait in them, None where it is not seen (on an accelerator).
    """

    kind: str
    calls: float
    bytes: float
    largest: int
    waited: float | None = None


class TimedStep(msgspec.Struct, frozen=True, kw_only=True, tag="timed step", tag_field="kind"):
    """Step whose collectives were timed, over all ranks. Shares are of the step.

    seconds: of the slowest rank, with what the timing costs; forward: in forwards; update: from the
    start of `optimizer.step` on; copied: in copies between devices; waited: in collectives; link:
    in collectives while all ranks are there; overlap: of the time of collectives, what is hidden;
    idle: by rank, in collectives while a rank that is needed has not come; tokens: of all ranks, 0
    where the model is not called with integers; tokens_per_second: over the last steps that are not
    measured; memory: by rank. None: not seen.
    """

    step: int
    seconds: float
    forward: float
    update: float | None
    copied: float
    waited: float | None
    link: float | None
    overlap: float | None
    idle: tuple[float, ...]
    collectives: tuple[CollectiveFigures, ...]
    tokens: int
    tokens_per_second: float | None
    microbatches: int
    memory: tuple[RankMemory, ...]


class CheckpointTime(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="kind"):
    """Save or load of a checkpoint, on rank 0.

    what: "save" or "load"; seconds: with the record of what was saved; replaced: an older
    checkpoint was in the folder when the save began.
    """

    step: int
    what: str
    folder: str
    seconds: float
    replaced: bool = False


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True, tag="out of memory", tag_field="kind"):
    """Where a rank ran out of memory.

    phase: "forward", "backward", "optimizer" or "elsewhere"; module: the innermost one that ran, by
    its name, "" if none did; place: file and line of the script; error: what was raised.
    """

    step: int
    rank: int
    phase: str
    module: str
    place: str
    error: str
    memory: RankMemory = RankMemory()


class CheckedStep(msgspec.Struct, frozen=True, tag="checked step", tag_field="kind"):
    """Step that was checked. violated: obligations; causes: of the first; seconds: of the check."""

    step: int
    violated: tuple[str, ...]
    causes: tuple[str, ...]
    seconds: float


class SeenPattern(msgspec.Struct, frozen=True, tag="pattern", tag_field="kind"):
    """Failure pattern when it was first seen. text: what it is and what shows it."""

    step: int
    pattern: str
    text: str


JobRecord = StepSeconds | TimedStep | CheckedStep | CheckpointTime | OutOfMemory | SeenPattern
"""One line of `metrics.jsonl`; `kind` tells which."""
