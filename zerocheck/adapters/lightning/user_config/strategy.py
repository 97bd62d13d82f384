"""Strategy of a Trainer, by its name or by its class with arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ....errors import UsageError, did_you_mean
from ...shared.user_config.section import Section
from ...shared.user_config.treatment import treat_keys
from .keys import DDP, DEEPSPEED, FSDP

Kind = Literal["auto", "ddp", "fsdp", "deepspeed"]

_LAUNCHERS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")

NAMES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "auto": ("auto", {}),
    **{name: ("ddp", {}) for name in _LAUNCHERS},
    **{
        f"{name}_find_unused_parameters_{word}": ("ddp", {"find_unused_parameters": word == "true"})
        for name in _LAUNCHERS
        for word in ("true", "false")
    },
    "fsdp": ("fsdp", {}),
    "fsdp_cpu_offload": ("fsdp", {"cpu_offload": True}),
    "deepspeed": ("deepspeed", {}),
    **{f"deepspeed_stage_{stage}": ("deepspeed", {"stage": stage}) for stage in (1, 2, 3)},
    "deepspeed_stage_2_offload": ("deepspeed", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3_offload": (
        "deepspeed",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
}
"""Names that Lightning registers, and what each is: a strategy, and its arguments."""

CLASSES: dict[str, tuple[Kind, Mapping[str, Any]]] = {
    "DDPStrategy": ("ddp", DDP),
    "FSDPStrategy": ("fsdp", FSDP),
    "DeepSpeedStrategy": ("deepspeed", DEEPSPEED),
}
"""Classes that are checked, and their keys."""

_XLA = "it is for TPUs"
_ALONE = "it trains in one process, where nothing is sharded"
OTHERS = {
    "deepspeed_stage_3_offload_nvme": "it takes NVMe",
    "single_device": _ALONE,
    **dict.fromkeys(("single_xla", "xla_debug", "xla", "single_tpu"), _XLA),
    "SingleDeviceStrategy": _ALONE,
    **dict.fromkeys(("XLAStrategy", "SingleDeviceXLAStrategy"), _XLA),
    "ModelParallelStrategy": (
        "it shards nothing itself, the model's configure_model() does; give that as a build "
        "function, path/to/file.py:build"
    ),
}
"""Names and classes of Lightning that are not checked, and why."""

PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
BY_SIZE = "size_based_auto_wrap_policy"
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST")


class Policy(NamedTuple):
    """Choice of modules. kind: all blocks of drawn models, or the size of a module; classes: names
    of those of a model of the user's own."""

    kind: Literal["block", "size", "whole"] = "whole"
    classes: tuple[str, ...] = ()


WHOLE = Policy()
"""The choice of no module."""


@dataclass(frozen=True, kw_only=True)
class FsdpArguments:
    """Arguments of FSDPStrategy, sorted.

    sharding: of FSDP1; units, checkpointing: which modules are units, and which are computed again
    in the backward; flat: the optimizer has flat parameters; full: a checkpoint is one file;
    prefetch: of the backward, None for torch's default.
    """

    sharding: str = "FULL_SHARD"
    units: Policy = WHOLE
    checkpointing: Policy = WHOLE
    flat: bool = False
    full: bool = True
    prefetch: str | None = None


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Strategy of a config, sorted.

    name: that of a strategy that the Trainer is given by its name, "" for a class; passed:
    arguments of its class as they stand; fsdp, deepspeed: what is asked of these, or None;
    left_out: arguments that a note mentions, and why.
    """

    kind: Kind
    name: str
    passed: Mapping[str, Any] = field(default_factory=dict)
    fsdp: FsdpArguments | None = None
    deepspeed: Section | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


def strategy_of(trainer: Section) -> Strategy:
    """Sort `strategy`. Raises UsageError for one that Lightning does not know, or that is refused.

    It is a name, or an object with `class_path` and `init_args`.
    """
    given = trainer.values.get("strategy")
    if given is None or isinstance(given, str):
        return _named(trainer)
    if not isinstance(given, dict):
        raise trainer.wrong("strategy", "the name of a strategy, or class_path with init_args")
    section = trainer.part("strategy")
    section.check_names(("class_path", "init_args", "dict_kwargs"), "LightningCLI refuses it")
    return _of_class(section)


def _named(trainer: Section) -> Strategy:
    word = str(trainer.values.get("strategy") or "auto").lower()
    if word in OTHERS:
        raise trainer.refuse("strategy", OTHERS[word], "ddp, fsdp, deepspeed")
    if word not in NAMES:
        allowed = "auto, ddp, fsdp, deepspeed, and what else Lightning registers of the three"
        raise trainer.wrong("strategy", allowed, did_you_mean(word, NAMES))
    kind, values = NAMES[word]
    source = Section(trainer.library, trainer.source, trainer.prefix, values)
    if kind == "fsdp":
        made = _fsdp(source, word)
        return made
    if kind == "deepspeed":
        return Strategy(kind=kind, name=word, deepspeed=source)
    return Strategy(kind=kind, name=word)


def _of_class(section: Section) -> Strategy:
    path = section.values.get("class_path")
    if not isinstance(path, str):
        raise section.wrong("class_path", "the path of a class, lightning.pytorch.strategies.NAME")
    name = path.rpartition(".")[2]
    if "." in path and not path.startswith(PACKAGES):
        raise section.refuse(
            "class_path",
            "classes of your own are given as an object: zerocheck run path/to/file.py:NAME",
            ", ".join(CLASSES),
        )
    if name in OTHERS:
        raise section.refuse("class_path", OTHERS[name], ", ".join(CLASSES))
    if name not in CLASSES:
        raise section.wrong("class_path", ", ".join(CLASSES), did_you_mean(name, CLASSES))
    kind, table = CLASSES[name]
    inside = section.part("init_args")
    values = {**inside.values, **section.part("dict_kwargs").values}
    inside = Section(f"Lightning's {name}", section.source, inside.prefix, values)
    treated = treat_keys(inside, table, "LightningCLI refuses it")
    if kind == "deepspeed":
        return Strategy(kind=kind, name="", deepspeed=inside)
    if kind == "fsdp":
        return _fsdp(inside, "", treated.passed)
    return Strategy(kind=kind, name="", passed=treated.passed)


def _fsdp(given: Section, name: str, passed: Mapping[str, Any] | None = None) -> Strategy:
    word = str(given.values.get("sharding_strategy") or SHARDING[0]).upper()
    if word in HYBRID:
        raise given.refuse(
            "sharding_strategy",
            "its groups are those of nodes, which ranks of a CPU are not",
            ", ".join(SHARDING),
        )
    if word not in SHARDING:
        allowed = ", ".join(SHARDING)
        raise given.wrong("sharding_strategy", allowed, did_you_mean(word, SHARDING))
    both = ("activation_checkpointing", "activation_checkpointing_policy")
    if all(map(given.says, both)):
        raise UsageError(
            f"{given.source}: Lightning cannot have both {both[0]} and {both[1]}; use the latter"
        )
    kind = given.word("state_dict_type", "full", ("full", "sharded"))
    prefetch = given.word(
        "backward_prefetch", None, [one.lower() for one in PREFETCH], capitals=True
    )
    left_out = {}
    if given.flag("cpu_offload", False):
        left_out[f"{given.prefix}cpu_offload"] = "it takes an accelerator"
    if given.flag("sync_module_states", False):
        left_out[f"{given.prefix}sync_module_states"] = "it takes an accelerator"
    checkpointing = next((policy for key in both if (policy := _policy(given, key))), WHOLE)
    if checkpointing.kind == "size":
        key = next(key for key in both if given.says(key))
        raise given.wrong(key, "paths of classes")
    return Strategy(
        kind="fsdp",
        name=name if not left_out else "",
        passed=passed or {},
        fsdp=FsdpArguments(
            sharding=word,
            units=_policy(given, "auto_wrap_policy") or WHOLE,
            checkpointing=checkpointing,
            flat=not given.flag("use_orig_params", True),
            full=kind == "full",
            prefetch=prefetch and prefetch.upper(),
        ),
        left_out=left_out,
    )


def _policy(given: Section, key: str) -> Policy | None:
    """Return the modules that a policy chooses; None for none. UsageError for one of the user's."""
    value = given.values.get(key)
    if value is None:
        return None
    allowed = f"a list of paths of classes, or {BY_SIZE}"
    if isinstance(value, dict) and str(value.get("class_path")).endswith("ModuleWrapPolicy"):
        value = (value.get("init_args") or {}).get("module_classes")
    if isinstance(value, str):
        if value.rpartition(".")[2] == BY_SIZE:
            return Policy("size")
        value = [value]
    if isinstance(value, list) and value and all(_is_path(one) for one in value):
        return Policy("block", tuple(value))
    raise given.wrong(key, allowed)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.rpartition(".")[2][:1].isupper()
