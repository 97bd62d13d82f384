"""Whole config, sorted: the fields that it fixes in cases, and what is left out.

What `accelerate launch` hands on by the environment is read by accelerate itself, in the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ....errors import UsageError
from ...deepspeed.user_config.config import DeepSpeedConfig, config_of
from ...shared.user_config.reader import Reader
from ...shared.user_config.section import AUTO, Section
from ...shared.user_config.text import plain
from ...shared.user_config.treatment import left_out_notes, treat_keys
from .fsdp import Fsdp, check_whole, fsdp_of
from .keys import DEEPSPEED, TOP

KINDS = ("no", "multi_cpu", "multi_gpu", "fsdp", "deepspeed")
OTHERS = ("megatron_lm", "xla", "multi_xpu", "multi_npu", "multi_mlu", "multi_hpu", "multi_musa")
MARKS = ("compute_environment", "distributed_type", "deepspeed_config")
"""Keys by which a config is known."""

UNITS = {"transformer_based_wrap": "block", "size_based_wrap": "size", "no_wrap": "whole"}
"""`sharding.wrap` of cases for each policy: what of a drawn model is a unit."""

Mixed = Literal["no", "bf16"]


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """A config, sorted.

    name: as it was given; fixed: fields of cases, nested; fsdp: None for DDP; mixed: the dtype of
    `mixed_precision`; deepspeed: the config that accelerate hands to DeepSpeed, or None; notes:
    sentences for who runs it.
    """

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Fsdp | None = None
    mixed: Mixed = "no"
    deepspeed: DeepSpeedConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Built-in implementation of the same code, whose known issues apply."""
        if self.deepspeed is not None:
            return self.deepspeed.code
        return "ddp" if self.fsdp is None else self.fsdp.code


def recognises(values: Mapping[str, Any]) -> bool:
    """Return True for a config of accelerate, by its keys."""
    return any(key in values for key in MARKS)


def config_for(source: str, fsdp: Fsdp | None, mixed: Mixed, **fixed: Any) -> AccelerateConfig:
    """Return the config of DDP or FSDP in this precision. fixed: further fields of cases."""
    precision = {}
    if mixed == "bf16":
        precision = {"compute": "bf16", "reduce": "fp32" if fsdp is None else "bf16"}
    notes = [f"{source} runs as {what_of(fsdp)} of accelerate"]
    if mixed == "bf16" and fsdp is not None:
        notes.append(
            f"{source}: in bf16 accelerate has FSDP reduce gradients in bf16 too, and the forward "
            "is under autocast as well"
        )
    if fsdp is not None:
        fixed["sharding"] = {
            "wrap": UNITS[fsdp.policy],
            "use_orig_params": not fsdp.flat,
            "offload": "none",
        }
        notes += [f"{source}: {note}" for note in fsdp.notes]
        drawn = {
            "transformer_based_wrap": "units are the blocks in drawn models, and the classes that "
            "are named in a model of your own (--model)",
            "size_based_wrap": "the size of units is drawn; a model of your own has that of the "
            "config",
        }.get(fsdp.policy)
        notes += [f"{source}: {drawn}"] if drawn else []
    return AccelerateConfig(
        name=source,
        fixed={**fixed, **({"precision": precision} if precision else {})},
        fsdp=fsdp,
        mixed=mixed,
        notes=tuple(notes),
    )


def what_of(fsdp: Fsdp | None) -> str:
    """Return what accelerate makes, in words."""
    if fsdp is None:
        return "DDP"
    return "FSDP2" if fsdp.version == 2 else f"FSDP1 ({fsdp.strategy.upper()})"


def _sorted(top: Section) -> AccelerateConfig:
    treat_keys(top, TOP, "it refuses the config")
    if not top.says("distributed_type"):
        raise UsageError(f"{top.source}: a config of accelerate has a distributed_type")
    if str(top.values["distributed_type"]).lower() in OTHERS:
        allowed = ", ".join(one.upper() for one in KINDS)
        raise top.refuse("distributed_type", "it is out of scope", allowed)
    kind = top.word("distributed_type", None, KINDS, capitals=True)
    dynamo = top.part("dynamo_config")
    if str(dynamo.values.get("dynamo_backend", "no")).lower() != "no":
        raise dynamo.refuse("dynamo_backend", "compiled kernels round in another order", "NO")
    mixed = _mixed(top)
    if kind == "deepspeed":
        return _of_deepspeed(top, mixed)
    fsdp = None
    if kind == "fsdp":
        fsdp = fsdp_of(check_whole(top, "fsdp_config"), launched=True)
    elif top.values.get("fsdp_config"):
        given = str(top.values["distributed_type"])
        raise UsageError(
            f"{top.source}: accelerate does not read fsdp_config where distributed_type is {given} "
            "(allowed: FSDP, or no fsdp_config)"
        )
    return config_for(top.source, fsdp, mixed, training={"norm": "2"})


def _mixed(top: Section) -> Mixed:
    """Return the dtype of mixed precision. YAML reads a bare `no` as false."""
    value = top.values.get("mixed_precision")
    if value in (None, False):
        return "no"
    word = top.word("mixed_precision", "no", ("no", "bf16", "fp16", "fp8"))
    if word in ("fp16", "fp8"):
        raise top.refuse("mixed_precision", f"the CPU has no {word}", '"no", "bf16"')
    return "bf16" if word == "bf16" else "no"


def _of_deepspeed(top: Section, mixed: Mixed) -> AccelerateConfig:
    """Return what accelerate makes of `deepspeed_config`: a config of DeepSpeed."""
    given = top.part("deepspeed_config")
    ignored = treat_keys(given, DEEPSPEED).left_out
    if given.says("deepspeed_config_file"):
        name = given.values["deepspeed_config_file"]
        values = plain(name, "DeepSpeed")
    else:
        values = _as_deepspeed(given)
        if mixed == "bf16":
            values["bf16"] = {"enabled": True}
    deepspeed = config_of(Section("DeepSpeed", top.source, "", values), maps_optimizer=True)
    return AccelerateConfig(
        name=top.source,
        fixed=deepspeed.fixed,
        deepspeed=deepspeed,
        notes=(*deepspeed.notes, *left_out_notes(top.source, ignored)),
    )


def _as_deepspeed(given: Section) -> dict[str, Any]:
    """Return the config that accelerate's plugin makes of these keys."""
    zero: dict[str, Any] = {"stage": given.whole("zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = given.word(f"offload_{part}_device", "none", ("none", "cpu", "nvme"))
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
    values: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": given.values.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": given.values.get("gradient_clipping", AUTO),
        "zero_optimization": zero,
    }
    return values


_reader = Reader("accelerate", _sorted)
read, code_of = _reader.read, _reader.code_of
