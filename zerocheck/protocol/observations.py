"""Observations of a rank on one case: small data here, tensors in the rank's arena."""

from __future__ import annotations

from typing import Literal

import msgspec

Point = Literal["state", "reduced", "clipped", "saved", "export"]
"""state: after a step (step -1: before the first); reduced, clipped: gradients within a step;
saved: the state once more, after it was saved; export: what `export` gave of it."""


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

    storage: a number, in the order in which the rank exposed its storages; numel: elements that the
    storage has; offset: of the first element within it.
    """

    name: str
    start: int
    stop: int
    storage: int
    numel: int
    offset: int
    padding: bool = False


class StepObservation(msgspec.Struct, frozen=True, array_like=True):
    """Losses of one step, its report, and the properties of its execution that decide bits."""

    losses: tuple[float, ...]
    """Loss of each microbatch, an fp32 value."""
    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float = 1.0
    misaligned: dict[str, int] = {}
    """Address of each parameter modulo its alignment, where that is not 0: see
    execution/alignment.py."""
    passed_through: tuple[str, ...] = ()
    """Modules whose inputs go through one more autograd node."""
    reported: bool = True
    """False for the last pass, which the harness ends before its update."""
    strides: dict[str, tuple[int, ...]] = {}
    """Strides of each parameter, in elements, where they are not the model's own."""
    tracked: tuple[str, ...] = ()
    """Frozen parameters that autograd tracks."""
    random: tuple[int, ...] = ()
    """Number of the random state at the entry of each loss, where the case carries it on."""
    viewed: tuple[str, ...] = ()
    """Modules whose parameters are made again, as views, at each call."""
    rng_after: tuple[str, ...] = ()
    """Hash of the random state at the end of each forward, if the model has dropout."""
    cast: tuple[str, ...] = ()
    """Modules whose inputs are cast to another dtype."""
    restrided: tuple[str, ...] = ()
    """Modules in `passed_through` where that changes the strides of an input."""
    reduced: bool = True
    """False if the gradient that was exposed may be the rank's own: see StepReport.reduced."""
    recomputed: tuple[str, ...] = ()
    """Modules whose forward runs without a graph, and again in the backward (reentrant
    checkpointing)."""
    graphs: tuple[str, ...] = ()
    """Fingerprint of the computation behind each loss (execution/graph.py); empty if not taken."""


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """Declarations of the implementation that was built."""

    semantics: dict[str, str] = {}
    stage: int | None = None
    """Stage of sharding: see Implementation.stage."""
    hides: tuple[str, ...] = ()
    """Kinds of state that are never shown: see Implementation.hides."""
    keeps: tuple[str, ...] = ()
    """Further contents of its checkpoints: see Implementation.keeps."""
    exports: bool = False
    """True if it can export its library's state."""


class CheckpointObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Observation of what a training segment saved and loaded."""

    samples: tuple[int, ...] = ()
    """Position in the data: after the load, then when the checkpoint was saved."""
    random: dict[str, bytes] = {}
    """Random state when the checkpoint was "saved", and after it was "loaded"."""
    save_seconds: float = 0.0
    """Seconds from the call of `save` until all was written."""
    refused: str = ""
    """Error of `load`, where only the load was to be tried."""
    waited: bool = False
    """True if the rank waited in such a load for another one that had refused it."""


class RankObservation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply of a rank that took the steps of a case, or loaded its checkpoint, and was observed."""

    declaration: Declaration = Declaration()
    manifests: tuple[tuple[Entry, ...], ...] = ()
    """Shards of each role that is recorded, referred to by number."""
    records: tuple[Recorded, ...] = ()
    steps: tuple[StepObservation, ...] = ()
    restored: bool = False
    """True if the case's state of mid-training was put in."""
    random_states: tuple[bytes, ...] = ()
    """States of the global generator, by number."""
    memory: tuple[Lie, ...] = ()
    """Memory locations of parameters and padding before the first step."""
    checkpoint: CheckpointObservation = CheckpointObservation()
    device: str = "cpu"
    """Device of the rank: "cuda:0"."""
    processor: str = ""
    """Processor that decides the bits of its kernels there: see devices.processor."""
