"""DeepSpeed config of TrainingArguments, with "auto" filled in as transformers does."""

from __future__ import annotations

import copy
from typing import Any

from ....errors import UsageError
from ...shared.user_config.section import AUTO, Section
from ...shared.user_config.text import plain, shown


def deepspeed_of(top: Section) -> dict[str, Any]:
    """Return the DeepSpeed config. Raises UsageError where it says another value than a field.

    transformers refuses that too. Sizes of batches are left "auto": they depend on the ranks.
    """
    given = top.values["deepspeed"]
    values = plain(given, "DeepSpeed") if isinstance(given, str) else copy.deepcopy(given)
    if not isinstance(values, dict):
        raise top.wrong("deepspeed", "the path of a DeepSpeed config, or an object")
    betas = [top.number("adam_beta1", 0.9), top.number("adam_beta2", 0.999)]
    for path, field, value in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", _count(top)),
        ("gradient_clipping", "max_grad_norm", top.number("max_grad_norm", 1.0)),
        ("optimizer.params.lr", "learning_rate", top.number("learning_rate", 5e-5)),
        ("optimizer.params.betas", "adam_beta1 and adam_beta2", betas),
        ("optimizer.params.eps", "adam_epsilon", top.number("adam_epsilon", 1e-8)),
        ("optimizer.params.weight_decay", "weight_decay", top.number("weight_decay", 0.0)),
        ("bf16.enabled", "bf16", top.flag("bf16", False)),
        ("fp16.enabled", "fp16", top.flag("fp16", False)),
    ):
        _fill(top.source, values, path, field, value)
    return values


def _count(top: Section) -> int:
    return top.whole("gradient_accumulation_steps", 1, lowest=1)


def _fill(source: str, values: dict[str, Any], path: str, field: str, value: Any) -> None:
    *parts, key = path.split(".")
    inside: Any = values
    for part in parts:
        inside = inside.get(part)
        if not isinstance(inside, dict):
            return
    if inside.get(key) == AUTO:
        inside[key] = value
    elif inside.get(key) is not None and inside[key] != value:
        raise UsageError(
            f"{source}: transformers refuses {path} {shown(inside[key])} in the DeepSpeed config "
            f'next to {field} {shown(value)} (allowed: the same value, or "auto")'
        )
