"""Prediction of an implementation's memory and collectives: exact, per rank."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Phase = Literal["built", "forward", "backward", "step", "closed"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""built: constructed, and restored if the case starts in mid-training; forward: after the forward
of the last microbatch; backward: gradients are reduced, not clipped; step: `train_step` has
returned; closed: after `close`. A rank's state is told of at the end of each."""

Category = Literal[
    "parameter", "gradient", "optimizer", "buffer", "bucket", "gathered", "activation", "other"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""parameter: the shard, master weights included; gradient: what a parameter's gradient is held
in; optimizer: moments and step counts; buffer: of the model; bucket: memory for communication;
gathered: units that are whole for a while; activation: what the backward still needs; other: all
else that has a holder."""

LASTING: tuple[Category, ...] = ("parameter", "optimizer", "buffer")
"""What stays from step to step. The rest is working memory."""

OF_ROLE: dict[str, Category] = {
    "parameter": "parameter",
    "master": "parameter",
    "padding": "parameter",
    "gradient": "gradient",
    "step": "optimizer",
    "buffer": "buffer",
}
"""Category of what `Implementation.shards` shows, by its role; of all others: "optimizer"."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one category that one rank holds at the end of one phase.

    step: index of the step, -1 for `built`, that of the last step for `closed`; holder: who holds
    them, in words (a parameter's name, a bucket, a module attribute), "" for all together.
    """

    phase: Phase
    step: int
    category: Category
    bytes: int
    holder: str = ""


Term = Literal[Category, "working", "gathering", "reducing"]
"""working: all that is held beyond parameters, optimizer states and buffers, as `works` says;
gathering, reducing: the same, right after memory was allocated for what is gathered, or a bucket.
"""

ALLOCATED: dict[Category, Term] = {"gathered": "gathering", "bucket": "reducing"}

NUMBER_BYTES = 8
"""Of one element at most: the loss, and what a training loop makes of it."""


def works(category: Category, size: int) -> bool:
    """Return True if an allocation is working memory: not lasting, and more than one number."""
    return category not in LASTING and size > NUMBER_BYTES


class Peak(msgspec.Struct, frozen=True, array_like=True):
    """Maximum memory of one rank at any instant of one phase of one step.

    bytes: by category, at the first instant at which they are the most together; highest: of each
    term, the most at any instant.
    """

    phase: Phase
    step: int
    bytes: dict[Category, int]
    highest: dict[Term, int]

    @property
    def total(self) -> int:
        """Sum over all categories."""
        return sum(self.bytes.values())


class Highest(msgspec.Struct, frozen=True, array_like=True):
    """Maximum bytes of one term at any instant of a phase."""

    phase: Phase
    step: int
    term: Term
    bytes: int


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Collective that one rank calls.

    kind: all_reduce, all_gather, reduce_scatter, broadcast, reduce, barrier, send, recv; bytes: of
    the whole tensor, that is, of what an all-gather puts out and a reduce-scatter takes in; ranks:
    of its group; dtype: "float32", "bfloat16", ..., "" without a tensor; phase: in which part of
    the step; step: its index; -1 for every step.
    """

    kind: str
    bytes: int
    ranks: int
    dtype: str
    phase: Phase
    step: int = -1


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Exact prediction for one rank.

    lines: what is held at the end of each phase, padding included; only categories that are there.
    A step that it does not tell of is as the last one before it that it tells of; a phase that it
    never tells of is not predicted. Activations and local variables are no part of it.
    calls: the collectives of the steps, in their order, or None if they are not predicted. They
    tell of each step up to `last`, and a later one is as that; with -1 each step is as they say.
    highest: the most of some terms at any instant of each phase, or None. What it does not tell of
    is not predicted; a step after `last` is as that one.
    """

    lines: tuple[Line, ...]
    calls: tuple[Call, ...] | None = None
    last: int = -1
    highest: tuple[Highest, ...] | None = None
