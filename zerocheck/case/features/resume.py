"""Features of checkpoints, and of disturbances of a run."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from ..schema import Case
from .row import table


def _damaged(case: Case, kind: str) -> bool:
    return any(segment.damage == kind for segment in case.resume)


def _sizes(case: Case) -> list[tuple[int, int]]:
    """Return the world sizes that save and load each checkpoint."""
    sizes = [case.world_size, *(prod(segment.mesh) for segment in case.resume)]
    return list(pairwise(sizes))


RESUME = table(
    ("resume", "a checkpoint saved and loaded", lambda c: bool(c.resume)),
    ("resume-more", "loaded on more ranks", lambda c: any(b > a for a, b in _sizes(c))),
    ("resume-fewer", "loaded on fewer ranks", lambda c: any(b < a for a, b in _sizes(c))),
    ("resume-same", "loaded on as many ranks", lambda c: any(b == a for a, b in _sizes(c))),
    ("resume-alone", "loaded on one rank", lambda c: any(b == 1 for _, b in _sizes(c))),
    ("resume-many", "saved on more than ten ranks", lambda c: any(a > 10 for a, _ in _sizes(c))),
    ("resume-twice", "two checkpoints in a row", lambda c: len(c.resume) > 1),
    ("resume-over", "saved over an older checkpoint", lambda c: any(x.over for x in c.resume)),
    (
        "resume-background",
        "a step is taken while the checkpoint is written",
        lambda c: any(x.background for x in c.resume),
    ),
    ("resume-killed", "a writer is killed", lambda c: any(x.killed is not None for x in c.resume)),
    ("resume-flip", "a bit is flipped in a checkpoint", lambda c: _damaged(c, "flip")),
    ("resume-truncate", "a file is cut short", lambda c: _damaged(c, "truncate")),
    ("resume-remove", "a file is missing", lambda c: _damaged(c, "remove")),
    ("resume-mix", "a file is that of another checkpoint", lambda c: _damaged(c, "mix")),
    ("resume-into", "loaded into another stage", lambda c: any(x.into for x in c.resume)),
    (
        "checkpoint-full",
        "the checkpoint is one file of whole tensors",
        lambda c: bool(c.resume) and c.sharding.checkpoint == "full",
        "checkpoint",
    ),
    (
        "checkpoint-sharded",
        "the checkpoint is of FSDP1's own sharded state-dict type",
        lambda c: bool(c.resume) and c.sharding.checkpoint == "sharded",
        "checkpoint",
    ),
    (
        "export-offload",
        "FSDP1's full state dict of the optimizer is offloaded",
        lambda c: bool(c.resume) and c.sharding.export_offload,
        "export_offload",
    ),
    (
        "without-device-mesh",
        "FSDP1's distributed checkpoint has ShardedTensors",
        lambda c: (
            bool(c.resume) and c.sharding.checkpoint == "distributed" and not c.sharding.device_mesh
        ),
        "device_mesh",
    ),
    dimension="resume",
)


DISTURBANCE = table(
    ("delays", "ranks delayed at random", lambda c: c.disturbance.delay > 0),
    dimension="disturbance",
)
