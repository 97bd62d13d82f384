"""Options of DeepSpeed's engine: fields of its configuration that cases vary. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...case.option_set import OptionFeature, OptionSet, OptionValue

if TYPE_CHECKING:
    from ...case.schema import Case

Elements = Annotated[int, Meta(ge=0, le=1 << 40)]
ReadOutKind = Literal["functions", "state-dict", "zero-to-fp32"]
PREFIX = "deepspeed"


class DeepSpeedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one case."""

    overlap_comm: bool = False
    """Gradients are reduced while the backward goes on."""
    contiguous_gradients: bool = True
    """Gradients are copied into the bucket as they come."""
    reduce_scatter: bool = True
    """Gradients are reduced to the rank that needs them, where its code does so."""
    round_robin_gradients: bool = False
    """Stages 1 and 2: parameters are dealt out to the partitions in turns."""
    prefetch_bucket: Elements = 1 << 20
    """Stage 3: elements that are gathered ahead of use, at most."""
    persistence_threshold: Elements = 0
    """Stage 3: a parameter of at most so many elements stays gathered."""
    max_live_parameters: Elements = 1 << 30
    """Stage 3: elements that may be gathered at a time before any are released."""
    own_optimizer: bool = False
    """The optimizer is made by the engine, as its configuration says, and not handed to it."""
    universal: bool = False
    """A checkpoint is converted to a universal one before it is loaded."""
    read_out: ReadOutKind = "functions"
    """Way in which exported parameters are read in a checkpoint case: the functions `safe_get_*`,
    the state dict of the whole model, or `zero_to_fp32` on a checkpoint."""


DRAWN: dict[str, tuple[OptionValue, ...]] = {
    "overlap_comm": (False, True),
    "contiguous_gradients": (True, True, False),
    "reduce_scatter": (True, True, False),
    "round_robin_gradients": (False, False, True),
    "prefetch_bucket": (1 << 20, 64, 0),
    "persistence_threshold": (0, 0, 16, 1 << 20),
    "max_live_parameters": (1 << 30, 64, 1),
    "own_optimizer": (False, False, True),
    "universal": (False, True, True),
    "read_out": ("functions", "state-dict", "zero-to-fp32"),
}

FEATURES = (
    OptionFeature(
        "overlap-comm",
        "gradients reduced while the backward goes on",
        "sharding",
        "overlap_comm",
        lambda options: options.overlap_comm,
    ),
    OptionFeature(
        "scattered-gradients",
        "gradients not copied into the bucket as they come",
        "sharding",
        "contiguous_gradients",
        lambda options: not options.contiguous_gradients,
    ),
    OptionFeature(
        "no-reduce-scatter",
        "gradients reduced to all ranks",
        "sharding",
        "reduce_scatter",
        lambda options: not options.reduce_scatter,
    ),
    OptionFeature(
        "round-robin",
        "parameters dealt out to the partitions in turns",
        "sharding",
        "round_robin_gradients",
        lambda options: options.round_robin_gradients,
    ),
    OptionFeature(
        "prefetch-bucket-small",
        "at most 64 elements gathered ahead",
        "sharding",
        "prefetch_bucket",
        lambda options: options.prefetch_bucket <= 64,
    ),
    OptionFeature(
        "persistent-parameters",
        "small parameters stay gathered",
        "sharding",
        "persistence_threshold",
        lambda options: options.persistence_threshold > 0,
    ),
    OptionFeature(
        "few-live-parameters",
        "at most 64 elements gathered at a time",
        "sharding",
        "max_live_parameters",
        lambda options: options.max_live_parameters <= 64,
    ),
    OptionFeature(
        "own-optimizer",
        "optimizer made by DeepSpeed's configuration",
        "sharding",
        "own_optimizer",
        lambda options: options.own_optimizer,
    ),
    OptionFeature(
        "universal-checkpoint",
        "the checkpoint is converted to DeepSpeed's universal format",
        "resume",
        "universal",
        lambda options: options.universal,
    ),
    OptionFeature(
        "read-out-state-dict",
        "DeepSpeed exports the state dict of the whole model",
        "resume",
        "read_out",
        lambda options: options.read_out == "state-dict",
    ),
    OptionFeature(
        "read-out-zero-to-fp32",
        "DeepSpeed's zero_to_fp32 exports the parameters from a checkpoint",
        "resume",
        "read_out",
        lambda options: options.read_out == "zero-to-fp32",
    ),
)

OPTIONS = OptionSet(PREFIX, DeepSpeedOptions, DRAWN, FEATURES)


def options_of(case: Case) -> DeepSpeedOptions:
    """Return DeepSpeed's options of a case."""
    options: DeepSpeedOptions = OPTIONS.values(case.options)
    return options


def named(*options: str) -> tuple[str, ...]:
    """Return the names in `case.options`."""
    return tuple(map(OPTIONS.named, options))


def stored_as(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as `case.options` has them: by `deepspeed.OPTION`."""
    return {OPTIONS.named(option): value for option, value in options.items()}
