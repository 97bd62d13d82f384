"""Whole config, sorted: the fields that it fixes in cases, the engine's keys, the keys left out.

A missing key has DeepSpeed's default: no `bf16` is fp32, no `gradient_clipping` clips at 1.0.
Values of "auto", as in HuggingFace's integration, are open, and drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...shared.user_config.reader import Reader
from ...shared.user_config.section import AUTO, Section
from ...shared.user_config.treatment import left_out_notes, treat_keys
from ..options import stored_as
from .batch import impossible_batch
from .keys import CHECKPOINT, TOP
from .optimizer import EngineAdam, adam_of
from .precision import dtypes_of
from .zero import Zero, zero_of

CLIP = 1.0
"""`GRADIENT_CLIPPING_DEFAULT` of DeepSpeed."""

MOST_MICROBATCHES = 16
"""Most microbatches of a step of a case; more are drawn, for a step would take too long."""

Average = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """A config, sorted.

    name: as it was given; fixed: fields of cases, nested; top, zero, bf16, data_types, checkpoint:
    what the engine is given there as it stands; accumulate_dtype: dtype of the sum of microbatches
    where parameters are in bf16, None for that of the reduction; average: over ranks, or their sum;
    predivide: what gradients are divided by before they are summed; batch: sizes of batches with
    which DeepSpeed does not start on any number of ranks, None for a key that the config has not;
    optimizer, param: whether these are offloaded; pinned: to pinned memory; own_kernel: DeepSpeed
    insists on its own kernel for states on the host; maps_optimizer: accelerate hands the config
    on, and replaces an optimizer of torch by that kernel's; adam: what the engine makes AdamW or
    Adam of; large: sizes beyond those of cases, by key of `zero_optimization`; without: obligations
    that no case can exercise, and why; notes: sentences for who runs it.
    """

    name: str
    stage: int
    fixed: Mapping[str, Any]
    top: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    bf16: Mapping[str, Any] = field(default_factory=dict)
    data_types: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    accumulate_dtype: str | None = None
    average: Average = "mean"
    predivide: float = 1.0
    batch: Mapping[str, int | None] = field(default_factory=dict)
    optimizer: bool = False
    param: bool = False
    pinned: bool = False
    own_kernel: bool = False
    maps_optimizer: bool = False
    adam: EngineAdam | None = None
    large: Mapping[str, int] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Built-in implementation of the same code, whose known issues apply."""
        return f"deepspeed{self.stage}"


def config_of(top: Section, *, maps_optimizer: bool = False) -> DeepSpeedConfig:
    """Sort a config that was read. Raises UsageError as `read` does.

    maps_optimizer: accelerate hands it on.
    """
    keys = treat_keys(top, TOP)
    checkpoint = treat_keys(top.part("checkpoint"), CHECKPOINT)
    zero = zero_of(top)
    dtypes = dtypes_of(top, zero.stage)
    adam = adam_of(top)
    clip, clip_note = _clip(top)
    average = _average(top, zero)
    predivide = _predivide(top, zero)
    _check_norm(top, zero, clip)
    training = {"norm": "2", **clip, **_accumulation(top)}
    options = {**zero.options, "own_optimizer": adam is not None}
    if zero.stage and not top.part("checkpoint").auto("load_universal"):
        options["universal"] = top.part("checkpoint").flag("load_universal", False)
    fixed: dict[str, Any] = {
        "training": training,
        "sharding": zero.sharding,
        "options": stored_as(options),
    }
    if dtypes.fixed:
        fixed["precision"] = dtypes.fixed
    if adam is not None:
        fixed["optimizer"] = adam.fixed
    without: dict[str, str] = {}
    if clip.get("clip", CLIP) is None:
        without["clip"] = f"{top.source} clips nothing (gradient_clipping is 0)"
    if dtypes.fixed.get("compute") == "bf16":
        without["buffers"] = (
            "DeepSpeed casts batch norms to bf16, which torch on the CPU cannot run"
        )
    left_out = {**keys.left_out, **checkpoint.left_out, **zero.left_out}
    return DeepSpeedConfig(
        name=top.source,
        stage=zero.stage,
        fixed=fixed,
        top=keys.passed,
        zero=zero.passed,
        bf16=dtypes.bf16,
        data_types=dtypes.data_types,
        checkpoint=checkpoint.passed,
        accumulate_dtype=dtypes.accumulate_dtype,
        average=average,
        predivide=predivide,
        batch=impossible_batch(top),
        optimizer=zero.optimizer,
        param=zero.param,
        pinned=zero.pinned,
        own_kernel=_insists(top, zero),
        maps_optimizer=maps_optimizer,
        adam=adam,
        large=zero.large,
        without=without,
        notes=(*_notes(top, zero, left_out, clip_note), *_kernel_notes(top, zero, maps_optimizer)),
    )


def _clip(top: Section) -> tuple[dict[str, float | None], str]:
    """Return `training.clip` and a note on it. DeepSpeed clips by default."""
    if top.auto("gradient_clipping"):
        return {}, ""
    clip = top.number("gradient_clipping", CLIP, below=1e30)
    note = "" if top.says("gradient_clipping") else f", and clips at {CLIP}, DeepSpeed's default"
    return {"clip": clip or None}, note


def _accumulation(top: Section) -> dict[str, int]:
    """Return `training.microbatches`. Ranks determine it if the sizes of both batches are given."""
    if top.auto("gradient_accumulation_steps"):
        return {}
    derived = all(map(top.says, ("train_batch_size", "train_micro_batch_size_per_gpu")))
    if derived and not top.says("gradient_accumulation_steps"):
        return {}
    count = top.whole("gradient_accumulation_steps", 1, lowest=1)
    return {"microbatches": count} if count <= MOST_MICROBATCHES else {}


def _insists(top: Section, zero: Zero) -> bool:
    """Return True if DeepSpeed refuses a client's optimizer that is not its kernel for the CPU."""
    return zero.optimizer and top.flag("zero_force_ds_cpu_optimizer", True)


def _of_file(top: Section) -> DeepSpeedConfig:
    """Sort a config in a file. DeepSpeed itself fills in no "auto": accelerate hands it on."""
    return config_of(top, maps_optimizer=_has_auto(top.values))


def _has_auto(value: Any) -> bool:
    """Return True if some value of a config is "auto"."""
    inside = value.values() if isinstance(value, Mapping) else ()
    return value == AUTO or any(_has_auto(one) for one in inside)


def _average(top: Section, zero: Zero) -> Average:
    word: Average = top.word("gradient_allreduce_op", "mean", ("mean", "sum"))
    if word == "sum" and zero.stage == 3:
        raise top.refuse("gradient_allreduce_op", "DeepSpeed refuses it at stage 3", '"mean"')
    return word


def _predivide(top: Section, zero: Zero) -> float:
    """Return `gradient_predivide_factor`.

    A power of two divides exactly; any other rounds twice more than a division by the number of
    ranks, and bounds count only that.
    """
    factor = top.number("gradient_predivide_factor", 1.0, lowest=1.0, below=1e6)
    changed = [
        name
        for name, plain_value in (("gradient_predivide_factor", 1.0), ("prescale_gradients", False))
        if top.says(name) and top.values[name] != plain_value
    ]
    top.flag("prescale_gradients", False)
    if changed and zero.stage and zero.options.get("reduce_scatter", True):
        raise top.refuse(
            changed[0],
            "with zero_optimization.reduce_scatter DeepSpeed refuses it",
            f"left out, or reduce_scatter false at stage {zero.stage}",
        )
    if math.frexp(factor)[0] != 0.5:
        raise top.refuse(
            "gradient_predivide_factor",
            "it rounds more often than the bounds of zerocheck count",
            "powers of two",
        )
    return 1.0 if top.flag("prescale_gradients", False) else factor


def _check_norm(top: Section, zero: Zero, clip: Mapping[str, float | None]) -> None:
    """Raise UsageError for `compute_grad_norm` false where DeepSpeed refuses it."""
    if zero.passed.get("compute_grad_norm", True):
        return
    if clip.get("clip", CLIP) is not None or zero.optimizer:
        where = Section(top.library, top.source, "zero_optimization.", zero.passed)
        raise where.wrong(
            "compute_grad_norm", "true; false where gradient_clipping is 0 and nothing is offloaded"
        )


def _notes(top: Section, zero: Zero, left_out: Mapping[str, str], clip_note: str) -> list[str]:
    """Return notes on the differences between the run and the file."""
    notes = [f"{top.source} runs as stage {zero.stage} of DeepSpeed{clip_note}"]
    notes += left_out_notes(top.source, left_out)
    drawn = [f"zero_optimization.{name}" for name in zero.large]
    if top.says("gradient_accumulation_steps") and _accumulation(top) == {}:
        drawn.append("gradient_accumulation_steps")
    if drawn:
        notes.append(
            f"{top.source}: drawn: {', '.join(drawn)}: they are for larger models than those of "
            "cases"
        )
    return notes


def _kernel_notes(top: Section, zero: Zero, maps_optimizer: bool) -> list[str]:
    """Return a note on the optimizer of states on the host, which the config does not name."""
    if not zero.optimizer or top.says("optimizer"):
        return []
    if _insists(top, zero) and maps_optimizer:
        return [
            f"{top.source}: not checked: DeepSpeedCPUAdam, which accelerate puts in place of AdamW "
            "if optimizer states are offloaded: it is compiled first. torch's AdamW takes the steps"
        ]
    asked = "; DeepSpeedCPUAdam is what it asks for" if _insists(top, zero) else ""
    return [f"{top.source}: it names no optimizer, so DeepSpeed is given torch's AdamW{asked}"]


_reader = Reader("DeepSpeed", _of_file)
read, code_of = _reader.read, _reader.code_of
