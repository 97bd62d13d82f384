"""Faults injected at the collectives, into any implementation: `IMPLEMENTATION+FAULT`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ... import causes as bugs
from .fault import Fault


def _row(
    name: str, obligation: str, summary: str, source: str, cause: str = "", **needs: Any
) -> Fault:
    return Fault(
        name=name,
        where="",
        parent="",
        summary=summary,
        source=source,
        obligation=obligation,
        causes=(cause,) if cause else (),
        injected=name,
        **needs,
    )


_KINDS = {
    row.name: row
    for row in (
        _row(
            "average-becomes-sum", "gradient",
            "the average over ranks is a sum", "PT #162338", bugs.GRADIENT_TIMES_W, world=3,
        ),
        _row(
            "double-average", "gradient",
            "the average over ranks is divided by W once more", "verl-SpeCo PR#29",
            bugs.GRADIENT_OVER_W, world=3,
        ),
        _row(
            "first-step-local", "gradient",
            "the first step is not reduced", "PT #60118", bugs.LOCAL_GRADIENT_ONLY, world=3,
        ),
        _row(
            "every-third-local", "gradient",
            "every third reduction is lost", "PT #187732; MG #599",
            bugs.LOCAL_GRADIENT_ONLY, world=3,
        ),
        _row(
            "rank-left-out", "gradient",
            "the last rank's gradient is not in the sum", "seen often", bugs.RANKS_LEFT_OUT,
            world=3,
        ),
        _row(
            "rank-counted-twice", "gradient",
            "the first rank's gradient is in the sum twice", "seen often",
            bugs.RANK_COUNTED_TWICE, world=3,
        ),
        _row(
            "half-group", "gradient",
            "each half of the group averages by itself", "DS PR#6546, #5618; TT #1551",
            bugs.REDUCED_IN_SMALLER_GROUPS, world=3,
        ),
        _row(
            "neighbours-shard", "gradient",
            "each rank gets the reduced shard of the next one", "DS PR#7601",
            bugs.SHARD_OF_ANOTHER_RANK, world=3,
        ),
        _row(
            "last-element-local", "gradient",
            "the last element of each bucket is not reduced", "FS #907", bugs.PART_NOT_REDUCED,
            world=3,
        ),
        _row(
            "reduction-stale", "gradient",
            "a reduction hands out the result of the step before", "DS PR#7805",
            bugs.GRADIENT_OF_THE_PREVIOUS_STEP,
        ),
        _row(
            "reduced-in-bf16", "gradient",
            "gradients travel in bf16 though they are fp32", "PT #104770; DS PR#5170",
            bugs.REDUCED_IN(format="bf16"),
        ),
        _row(
            "norm-local", "clip",
            "each rank clips by the norm of what it holds", "RLinf PR#1542", bugs.LOCAL_NORM,
            features=("clip-tight",), without=("loss-scale",),
        ),
        _row(
            "gather-stale", "publish",
            "what is gathered is that of the step before", "MG #3140; DS PR#7707",
            bugs.PARAMETERS_OF_THE_PREVIOUS_STEP,
        ),
        _row(
            "gather-swapped", "loss",
            "two shards change places when they are gathered", "DS PR#318", bugs.SHARDS_EXCHANGED,
        ),
        _row(
            "gather-rounded", "loss",
            "shards travel in bf16 though they are fp32", "PT #104770", bugs.COPIES_ROUNDED_TO_BF16,
        ),
        _row(
            "broadcast-lost", "buffers",
            "a broadcast does not arrive", "PT #178569; LlamaFactory #10820", bugs.BUFFERS_LOCAL,
            features=("block-batch-norm", "several-steps"), world=3,
        ),
        _row(
            "wait-times-out", "gradient",
            "a wait for a reduction gives up after a millisecond", "DS PR#5606",
            features=("delays",), sometimes=0.5,
        ),
    )
}  # fmt: skip
"""What each is. The obligation and the cause are those of a fully sharded parent, unless a row
below says another: what follows from a wrong collective depends on what it is used for."""


def injected_into(implementation: str, **otherwise: Mapping[str, Any]) -> list[Fault]:
    """Return all faults that can be injected, planted into one implementation.

    otherwise: fields that are others there, by the name of the fault with `_` for `-`. Where the
    implementation has no such collective, its cases are unsupported and say so.
    """
    rows = []
    for name, kind in _KINDS.items():
        where = f"{implementation}+{name}"
        changed = otherwise.get(name.replace("-", "_"), {})
        rows.append(replace(kind, name=where, where=where, parent=implementation, **changed))
    return rows


def _default(implementation: str, *left_out: str, **otherwise: Mapping[str, Any]) -> list[Fault]:
    """Return the rows of a built-in implementation, without faults in collectives it never uses."""
    rows = injected_into(implementation, **otherwise)
    return [row for row in rows if row.injected not in left_out]


_DIVIDED_FIRST: dict[str, Any] = {"causes": (bugs.LOCAL_GRADIENT_OVER_W,)}
_UNNAMED: dict[str, Any] = {"causes": ()}
"""Where padding moves with the shards, or a bucket has one element, other causes fit some cases."""

INJECTED = [
    *_default("fsdp2", "broadcast-lost", last_element_local=_UNNAMED),
    *_default(
        "fsdp1", "broadcast-lost", neighbours_shard=_UNNAMED, gather_swapped=_UNNAMED,
        first_step_local=_DIVIDED_FIRST, every_third_local=_DIVIDED_FIRST,
    ),
    *_default(
        "ddp", "neighbours-shard", "norm-local", "gather-stale", "gather-swapped", "gather-rounded",
        first_step_local=_DIVIDED_FIRST, every_third_local=_DIVIDED_FIRST,
    ),
]  # fmt: skip
