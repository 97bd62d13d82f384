"""FSDP as accelerate is asked for it, in a config or in TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....errors import UsageError, did_you_mean
from ...shared.user_config.section import Section
from .keys import FSDP

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
_NUMBERS = dict(zip("123", STRATEGIES, strict=True))
"""Numbers of torch's ShardingStrategy, which accelerate takes too."""
HYBRID = ("hybrid_shard", "hybrid_shard_zero2", "4", "5")
POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
STATE_DICTS = ("full_state_dict", "sharded_state_dict", "local_state_dict")
PREFETCHES = ("backward_pre", "backward_post", "no_prefetch")

Policy = Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"]

_OF_POLICY = {
    "fsdp_transformer_layer_cls_to_wrap": "transformer_based_wrap",
    "fsdp_min_num_params": "size_based_wrap",
}
"""Keys that count with one policy alone."""


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """FSDP of a config, sorted.

    version: 1 or 2; strategy: of FSDP1; policy: which modules are units; checkpointing: activations
    of units are computed again in the backward; flat: the optimizer has flat parameters; full: a
    checkpoint is of whole tensors; from_rank_0: parameters are sent by rank 0 when it is made;
    offload: parameters are on the host; notes: what accelerate does not read, and what a check
    leaves out.
    """

    version: Literal[1, 2]
    strategy: str
    policy: Policy
    checkpointing: bool
    flat: bool
    full: bool
    from_rank_0: bool
    offload: bool
    notes: tuple[str, ...]

    @property
    def code(self) -> str:
        """Built-in implementation of the same code of torch."""
        if self.version == 2:
            return "fsdp2"
        names = {"shard_grad_op": "fsdp1-grad-op", "no_shard": "fsdp1-no-shard"}
        return names.get(self.strategy, "fsdp1")


def fsdp_of(given: Section, *, launched: bool) -> Fsdp:
    """Sort `fsdp_config`, of which every key has its prefix `fsdp_`.

    launched: `accelerate launch` reads it; False for a Trainer, which reads the same keys, FSDP2 by
    default, and always the key of its version for what is sharded. Raises UsageError for a key or a
    value that accelerate does not know, and for what zerocheck does not check.
    """
    given.check_names(FSDP, "it would ignore it without a word")
    version = _version(given, "1" if launched else "2")
    strategy = "full_shard"
    if version == 1:
        strategy = _strategy(
            given, "fsdp_sharding_strategy" if launched else "fsdp_reshard_after_forward"
        )
    elif given.says("fsdp_reshard_after_forward"):
        _flag(given, "fsdp_reshard_after_forward")
    policy: Policy = given.word(
        "fsdp_auto_wrap_policy",
        "no_wrap" if launched else "transformer_based_wrap",
        POLICIES,
        capitals=True,
    )
    kind = given.word("fsdp_state_dict_type", None, STATE_DICTS, capitals=True)
    if kind == "local_state_dict":
        raise given.refuse(
            "fsdp_state_dict_type",
            "each rank then writes a flat part that no other number of ranks can load",
            '"SHARDED_STATE_DICT", "FULL_STATE_DICT"',
        )
    given.word("fsdp_backward_prefetch", None, (*PREFETCHES, "1", "2"), capitals=True)
    if given.says("fsdp_min_num_params"):
        given.whole("fsdp_min_num_params", 0)
    checkpointing = _flag(given, "fsdp_activation_checkpointing")
    if _flag(given, "fsdp_activation_checkpointing_offload"):
        raise given.refuse(
            "fsdp_activation_checkpointing_offload", "it takes an accelerator", "false, left out"
        )
    for key in (
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_use_orig_params",
        "fsdp_forward_prefetch",
        "fsdp_sync_module_states",
    ):
        _flag(given, key)
    offload = _flag(given, "fsdp_offload_params")
    return Fsdp(
        version=version,
        strategy=strategy,
        policy=policy,
        checkpointing=checkpointing,
        full=kind == "full_state_dict" or (kind is None and (version == 1 or not launched)),
        from_rank_0=_flag(given, "fsdp_cpu_ram_efficient_loading", default=launched),
        flat=version == 1 and not _flag(given, "fsdp_use_orig_params", default=True),
        offload=offload,
        notes=tuple(_notes(given, version, policy, offload=offload, launched=launched)),
    )


def prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the prefix `fsdp_` at every key, which both spellings mean."""
    return {key if key.startswith("fsdp_") else f"fsdp_{key}": one for key, one in values.items()}


def _version(given: Section, default: str) -> Literal[1, 2]:
    value = str(given.values.get("fsdp_version", default))
    if value not in ("1", "2"):
        raise given.wrong("fsdp_version", "1, 2")
    return 1 if value == "1" else 2


def _strategy(given: Section, key: str) -> str:
    value = str(given.values[key]).lower() if given.says(key) else STRATEGIES[0]
    value = _NUMBERS.get(value, value)
    if value in HYBRID:
        raise given.refuse(
            key, "its groups are those of nodes, which ranks of a CPU are not", "FULL_SHARD"
        )
    if value not in STRATEGIES:
        words = ", ".join(one.upper() for one in STRATEGIES)
        raise given.wrong(key, words, did_you_mean(value, STRATEGIES))
    return value


def _flag(given: Section, key: str, *, default: bool = False) -> bool:
    """Return a boolean, which accelerate takes as a word too."""
    value = given.values.get(key)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if str(value).lower() not in ("true", "false", "yes", "no", "on", "off", "0", "1"):
        raise given.wrong(key, "true or false")
    return str(value).lower() in ("true", "yes", "on", "1")


def _notes(
    given: Section, version: int, policy: str, *, offload: bool, launched: bool
) -> list[str]:
    """Return what accelerate does not read, and what a check on the CPU leaves out."""
    notes = []
    for key in given.values:
        found = FSDP.get(key)
        if found is None or not given.says(key):
            continue
        if not launched and key == "fsdp_reshard_after_forward":
            continue
        if found.read_by not in ("both", str(version)):
            instead = f"; {found.instead} is what it reads" if found.instead else ""
            notes.append(f"accelerate does not read {key} with FSDP{version}{instead}")
        elif _OF_POLICY.get(key, policy) != policy:
            notes.append(f"accelerate does not read {key} with {policy.upper()}")
    if offload:
        notes.append("left out: fsdp_offload_params: it takes an accelerator")
    if version == 1 and _flag(given, "fsdp_sync_module_states", default=True):
        notes.append(
            "left out: fsdp_sync_module_states, fsdp_cpu_ram_efficient_loading: with FSDP1 they "
            "take an accelerator; cases give all ranks the same model"
        )
    return notes


def check_whole(section: Section, key: str) -> Section:
    """Return the object under a key, with prefixed keys; UsageError where both spellings stand."""
    inside = section.part(key)
    for name in inside.values:
        if not name.startswith("fsdp_") and f"fsdp_{name}" in inside.values:
            raise UsageError(f"{section.source}: {key} has {name!r} and 'fsdp_{name}'; give one")
    return inside._replace(values=prefixed(inside.values))
