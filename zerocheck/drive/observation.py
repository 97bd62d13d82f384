"""Messages of a rank on one case: small structured data here, tensors in the rank's arena."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..case.schema import Case, UserModel
from ..contract.layout import Call, Layout, Line, Peak, Phase

Point = Literal["state", "reduced", "clipped", "saved", "export"]
"""state: after a step (step -1: before the first); reduced, clipped: gradients within a step;
saved: the state once more, after it was saved; export: what `export` gave of it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the judge to a rank.

    look: only look at the user's model of that name, and tell what it is; no case: only load the
    implementation and tell what it declares; observe False: run the steps
    bare, as a user's loop would; trace: note every collective (for hangs and crashes); candidates:
    run nothing, and tell of each case whether the implementation supports it. save, load: the
    directories of the checkpoints that this leg of a resumed case writes and reads.
    """

    implementation: str = ""
    look: str = ""
    case: Case | None = None
    candidates: tuple[Case, ...] = ()
    observe: bool = True
    trace: bool = False
    save: str = ""
    load: str = ""
    older: str = ""
    """Directory of the checkpoint that `save` is to replace, if it is another one."""
    samples: int = 0
    """Samples that the legs before have read."""
    kill: tuple[int, float] | None = None
    """(rank, seconds): this rank is killed so long after it began to save."""
    only_load: bool = False
    """Load, and tell what came of it; take no step."""
    measure: bool = False
    """Take the steps bare, and tell what they hold and send: see `Measured`."""
    time: bool = False
    """Take the steps bare, and tell how they passed: see `Timed`."""
    build: bool = False
    """Build the implementation for the case and close it; take no step."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Location of one shard: the range [start, stop) of the flattened whole, or a box.

    present is False for a gradient that does not exist (None).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    box: tuple[tuple[int, int], ...] | None = None
    present: bool = True


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """All shards of one role and dtype at one point: a manifest and a place in the arena.

    offset in bytes; numel in elements, over all entries of the manifest in order.
    """

    step: int
    point: Point
    role: str
    manifest: int
    offset: int
    numel: int
    dtype: str


class Lie(msgspec.Struct, frozen=True, array_like=True):
    """Memory location of the elements [start, stop) of a flattened parameter, or of padding.

    storage: a number, in the order in which the rank showed its storages; numel: elements that the
    storage has; offset: of the first element within it.
    """

    name: str
    start: int
    stop: int
    storage: int
    numel: int
    offset: int
    padding: bool = False


class StepSeen(msgspec.Struct, frozen=True, array_like=True):
    """Losses of one step, its report, and properties of the model's execution.

    Losses per microbatch are fp32 values. misaligned: {parameter: its `lies`, of drive/fidelity}
    where that is not 0; passed_through: modules whose inputs go through one more autograd node;
    restrided: those of them where it changes strides of an input; strides: {parameter: its strides
    in elements} where they are not the model's own; tracked: frozen parameters that autograd
    tracks; random: where the case carries random numbers on, the number of the state at the entry
    of each loss; viewed: modules whose parameters are recreated, as views, at each call; left: a
    hash of the random state at the end of each forward, if the model has dropout; cast: modules
    whose inputs are cast to another dtype; recomputed: modules whose forward runs without a graph,
    and again in the backward (reentrant checkpointing); graphs: a fingerprint of the computation
    behind each loss (see drive/graph.py), empty where none was taken.
    """

    losses: tuple[float, ...]
    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float = 1.0
    misaligned: dict[str, int] = {}
    passed_through: tuple[str, ...] = ()
    reported: bool = True
    """False for the last forward and backward, which the harness ends before its update."""
    strides: dict[str, tuple[int, ...]] = {}
    tracked: tuple[str, ...] = ()
    random: tuple[int, ...] = ()
    viewed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    restrided: tuple[str, ...] = ()
    reduced: bool = True
    """False if the gradient that was shown may be the rank's own: see StepReport.reduced."""
    recomputed: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and collectives of a rank during its steps, with nothing else observed.

    lines: bytes held at the end of each phase of each step, by category and holder; layout:
    prediction of the implementation, or None; calls: the collectives of each step, in the order in
    which they were called; steps: number taken, at least that of the case; stage: declared by the
    implementation, or None; peaks: the maximum held within each phase of each step, on the CPU;
    pools: on a GPU, at the end of each phase.
    """

    lines: tuple[Line, ...] = ()
    peaks: tuple[Peak, ...] = ()
    layout: Layout | None = None
    calls: tuple[tuple[Call, ...], ...] = ()
    steps: int = 0
    stage: int | None = None
    pools: tuple[CudaPool, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """True if it was measured on a GPU."""
        return bool(self.pools)


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


class CollectiveTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of one rank in a collective, in ns of the clock of `Timed`.

    kind, bytes, ranks: as of `contract.layout.Call`; root: rank within the group, -1 without one;
    begun: its operator was called; returned: the operator gave the caller the Work; stalled: since
    when the caller had called no operator when the collective was over, not before `returned`, and
    the same as `over` where it was within one; over: the Work was complete.
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

    began, ended: of `train_step`, ns; forward: ns from entering a microbatch until its loss, all
    microbatches together; reduced: when `step.reached("reduced")` was called, 0 if it was not;
    copied: ns in operators that copy between devices; calls: in their order.
    """

    began: int
    ended: int
    forward: int = 0
    reduced: int = 0
    copied: int = 0
    calls: tuple[CollectiveTimes, ...] = ()


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rank's steps, with nothing else observed.

    steps: those that count, without the warm-up; clock: which CLOCK_MONOTONIC, the same for ranks
    whose times can be compared; options: those that the implementation declares to obey; allocated,
    reserved: the most bytes in these steps by the accelerator's allocator, None without one.
    """

    steps: tuple[StepTimes, ...] = ()
    clock: str = ""
    options: tuple[str, ...] = ()
    allocated: int | None = None
    reserved: int | None = None


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a rank for one case."""

    unsupported: str | None = None
    semantics: dict[str, str] = {}
    manifests: tuple[tuple[Entry, ...], ...] = ()
    records: tuple[Recorded, ...] = ()
    steps: tuple[StepSeen, ...] = ()
    restored: bool = False
    """Whether the case's state of mid-training was put in."""
    random_states: tuple[bytes, ...] = ()
    """States of the global generator, by number."""
    memory: tuple[Lie, ...] = ()
    """Where parameters and padding lay before the first step."""
    keeps: tuple[str, ...] = ()
    exports: bool = False
    samples: tuple[int, ...] = ()
    """Where the data stands: after the load, then when the checkpoint was saved."""
    save_seconds: float = 0.0
    """What saving took."""
    refused: str = ""
    """What `load` raised, where nothing but the load was to be tried."""
    waited: bool = False
    """Whether the rank waited in such a load for one that had refused it."""
    random: dict[str, bytes] = {}
    """The random state when the checkpoint was "saved", and after it was "loaded"."""
    measured: Measured | None = None
    """Of a job with `measure`."""
    written_seconds: float = 0.0
    """The same without what the harness copied meanwhile; 0 if training went on meanwhile."""
    load_seconds: float = 0.0
    """What loading took."""
    timed: Timed | None = None
    """Of a job with `time`."""
    stage: int | None = None
    """Declared stage of sharding: see Implementation.stage."""
    hides: tuple[str, ...] = ()
    """Kinds of state that are never shown: see Implementation.hides."""
    device: str = "cpu"
    """On which the rank ran: "cuda:0"."""
    processor: str = ""
    """What decides the bits of its kernels there: see devices.processor."""


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of rank 0 to a job with `look`: the user's model, or the reason to reject it.

    Other ranks reply without content.
    """

    model: UserModel | None = None
    error: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a `describe` job: the implementation's declarations, or why it is unusable."""

    error: str = ""
    semantics: dict[str, str] = {}
    fixed: dict[str, object] = {}
    without: dict[str, str] = {}
    """Obligations that no case of it can exercise, and why."""
    options: tuple[str, ...] | None = None
    """Fields of `case.sharding` that it obeys; None: it does not say."""
    restores: bool = False
    resumes: bool = False
    """Whether it has `save` and `load`."""
    lacks: tuple[str, ...] = ()
    """Fields of `case.training` that it does not handle: they are not drawn."""


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a job with candidates.

    of: for each candidate 0 if it is supported, else 1 + the place of its reason in `reasons`.
    """

    reasons: tuple[str, ...] = ()
    of: tuple[int, ...] = ()
