"""Whole file, sorted: the fields that it fixes in cases, and what a Trainer is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import UsageError
from ...accelerate.user_config.config import AccelerateConfig, config_for
from ...accelerate.user_config.fsdp import Fsdp, check_whole, fsdp_of
from ...deepspeed.user_config.config import MOST_MICROBATCHES, config_of
from ...shared.user_config.reader import Reader
from ...shared.user_config.section import Section
from ...shared.user_config.text import shown
from ...shared.user_config.treatment import left_out_notes, treat_keys
from .deepspeed import deepspeed_of
from .keys import FIELDS, FSDP, FSDP_OF_XLA, LEGACY
from .optimizer import optimizer_of

MARKS = (
    "output_dir",
    "per_device_train_batch_size",
    "num_train_epochs",
    "learning_rate",
    "max_grad_norm",
    "lr_scheduler_type",
    "fsdp",
    "deepspeed",
)
"""Fields by which TrainingArguments are known."""

NUMBERS = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)
"""Fields that are numbers, some of which YAML 1.1 takes for text: 3e-4 has no point."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(AccelerateConfig):
    """TrainingArguments, sorted. arguments: those that a Trainer of cases is given."""

    arguments: Mapping[str, Any] = field(default_factory=dict)


def recognises(values: Mapping[str, Any]) -> bool:
    """Return True for TrainingArguments, by their fields."""
    return any(key in values for key in MARKS)


def _sorted(top: Section) -> TrainerConfig:
    others = list(top.ignored_names(FIELDS))
    values = {key: one for key, one in top.values.items() if key not in others}
    texts = {key: number for key in NUMBERS if (number := _number(values.get(key))) is not None}
    top = top._replace(values={**values, **texts})
    keys = treat_keys(top, FIELDS, "it refuses the field")
    notes = [f"{top.source}: left out: {', '.join(others)}: no TrainingArguments"] if others else []
    notes += [
        f"{top.source}: {key} is text to YAML, {shown(values[key])}, and HfArgumentParser hands it "
        "on as text; a number has a point: 3.0e-4"
        for key in texts
    ]
    notes += left_out_notes(top.source, keys.left_out)
    if top.says("deepspeed"):
        return _of_deepspeed(top, notes)
    fsdp = _fsdp(top)
    clip = top.number("max_grad_norm", 1.0, below=1e30)
    count = top.whole("gradient_accumulation_steps", 1, lowest=1)
    if count > MOST_MICROBATCHES:
        notes.append(f"{top.source}: drawn: gradient_accumulation_steps: steps would take long")
    training: dict[str, Any] = {"norm": "2", "clip": clip or None}
    if count <= MOST_MICROBATCHES:
        training["microbatches"] = count
    made = config_for(
        top.source,
        fsdp,
        "bf16" if top.flag("bf16", False) else "no",
        training=training,
        optimizer=optimizer_of(top),
    )
    notes.append(
        f"{top.source}: a Trainer seeds all ranks alike, so that ranks draw the same dropout "
        "masks; cases seed each rank by itself"
    )
    notes[:0] = [one.replace("of accelerate", "in a Trainer") for one in made.notes]
    arguments = {key: top.values[key] for key in ("bf16", "fsdp", "fsdp_config") if top.says(key)}
    return TrainerConfig(
        name=top.source,
        fixed=made.fixed,
        fsdp=fsdp,
        mixed=made.mixed,
        notes=tuple(notes),
        arguments={**keys.passed, **arguments},
    )


def _number(value: Any) -> float | None:
    """Return the number that a text is; None for what is no text, or no number."""
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _of_deepspeed(top: Section, notes: list[str]) -> TrainerConfig:
    section = Section("DeepSpeed", top.source, "", deepspeed_of(top))
    deepspeed = config_of(section, maps_optimizer=True)
    return TrainerConfig(
        name=top.source,
        fixed=deepspeed.fixed,
        deepspeed=deepspeed,
        notes=(*deepspeed.notes, *notes),
    )


def _fsdp(top: Section) -> Fsdp | None:
    """Return FSDP as a Trainer sets it up; None without. `fsdp` may be words of old configs."""
    words = top.values.get("fsdp")
    if words in (None, False, "", []):
        if top.values.get("fsdp_config"):
            raise UsageError(
                f"{top.source}: a Trainer does not read fsdp_config without fsdp (allowed: fsdp "
                "true, or no fsdp_config)"
            )
        return None
    if isinstance(top.values.get("fsdp_config"), str):
        raise top.refuse("fsdp_config", "it is read from one file", "the object itself")
    given = check_whole(top, "fsdp_config")
    given.check_names([f"fsdp_{key}" for key in (*FSDP, *FSDP_OF_XLA)], "a Trainer ignores it")
    values = {key: one for key, one in given.values.items() if key[5:] not in FSDP_OF_XLA}
    for key in FSDP_OF_XLA:
        if given.values.get(f"fsdp_{key}"):
            raise given.refuse(f"fsdp_{key}", "it is for TPUs", "false, left out")
    if isinstance(words, str):
        words = words.split()
    version = str(values.get("fsdp_version", 2))
    for word in words if isinstance(words, list) else ():
        if word == "offload":
            values.setdefault("fsdp_cpu_offload", True)
        elif word in LEGACY:
            whole = word == "full_shard" if version == "2" else word
            values.setdefault("fsdp_reshard_after_forward", whole)
        elif word not in ("auto_wrap", "true", "True"):
            raise top.wrong("fsdp", "true, false")
    return fsdp_of(given._replace(values=_as_launched(values)), launched=False)


def _as_launched(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `fsdp_config` under the names that accelerate has for them."""
    names = {"fsdp_cpu_offload": "fsdp_offload_params"}
    left = {key: one for key, one in values.items() if key != "fsdp_limit_all_gathers"}
    return {names.get(key, key): one for key, one in left.items()}


_reader = Reader("transformers", _sorted)
read, code_of = _reader.read, _reader.code_of
