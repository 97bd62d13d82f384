"""Values from which the fields of a case are drawn. Every list begins with the simplest.

A value that is listed twice is drawn twice as often. The values open the blind spots of the judge:
parameters smaller than the world, rates at which a decay is visible, norms on both sides of the
gradient's, moments far from 1.
"""

from __future__ import annotations

from typing import Literal

from .schema import (
    BackwardPrefetchKind,
    BlockKind,
    CheckpointKind,
    CompileKind,
    KernelKind,
    MomentsKind,
    ScheduleKind,
    StemKind,
    WrapKind,
)

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 1)
SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 1, 17)
HIDDEN = (1, 2, 3, 4, 5, 6, 8, 11, 16, 33, 64)
VOCABULARIES = (5, 6, 7, 8, 11, 16, 24)
MORE_BLOCKS = (90, 72, 55, 37)
"""Percentage of the models with n blocks that get one more."""

KINDS: tuple[BlockKind, ...] = (
    "mlp",
    "mlp",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "conv",
    "attention",
    "attention",
    "recurrent",
    "experts",
)
STEMS: tuple[StemKind, ...] = ("dense", "conv", "embedding")
MOMENTS: tuple[MomentsKind, ...] = ("typical", "typical", "typical", "tiny", "huge", "zero")
LOSS_SCALES = (65536.0, 1024.0, 2.0)
SCHEDULES: tuple[ScheduleKind, ...] = ("constant", "constant", "warmup", "cosine")
KERNELS: tuple[KernelKind, ...] = ("foreach", "foreach", "for-loop", "fused")
NORMS: tuple[Literal["2", "inf"], ...] = ("2", "2", "inf")
WRAPS: tuple[WrapKind, ...] = ("whole", "block", "layer", "size")
BACKWARD_PREFETCHES: tuple[BackwardPrefetchKind, ...] = ("pre", "pre", "post", "none")
CHECKPOINTS: tuple[CheckpointKind, ...] = ("distributed", "distributed", "full", "sharded")
RATES = (
    (1e-3, 0.01),
    (1e-3, 0.0),
    (1e-3, 0.1),
    (1e-2, 0.0),
    (1e-2, 0.01),
    (1e-2, 0.1),
    (3e-5, 0.0),
    (3e-5, 0.5),
)
"""(lr, weight_decay): a decay is seen if lr * weight_decay >= 1e-5, so the rest is not drawn."""

CLIPS = (1.0, 0.003, 1e3)
"""Maximum norms in units of the loss: sometimes active, surely active, surely not."""

GROUP_PATTERNS = ("*.bias", "head.*", "stem.*", "*norm*", "blocks.*", "*.weight", "blocks.0.*")
ZERO_PATTERNS = ("*.bias", "head.*", "stem.weight", "blocks.0.*", "*norm.weight", "*.down.*")
FROZEN_PATTERNS = ("stem.*", "*.bias", "head.*", "blocks.0.*", "*norm*", "*.weight", "blocks.*")

COMPILES: dict[int, CompileKind] = {7: "eager", 22: "aot_eager"}
"""Remainder of a case's seed by COMPILED_OF -> the backend that compiles its model. Inductor is for
those who ask: a case of it takes a minute or more."""
COMPILED_OF = 61
