"""Configs of libraries that are known by their keys and not read, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....errors import UsageError
from .text import TOML


class UnreadConfig(NamedTuple):
    """Config of a library.

    keys: those by which it is known, all of them; advice: a sentence on what it is and what to do.
    """

    library: str
    keys: tuple[str, ...]
    advice: str


UNREAD = (
    UnreadConfig(
        "torchtitan",
        ("job", "model", "training"),
        "its sharding is code: give the recipe as a build function, zerocheck run titan.py:recipe "
        "(docs/torchtitan.md)",
    ),
    UnreadConfig(
        "nanotron",
        ("model", "parallelism", "tokens"),
        "its sharding is code: give what nanotron builds as a build function, zerocheck run "
        "my_nanotron.py:build (docs/check-your-sharder.md)",
    ),
    UnreadConfig(
        "axolotl",
        ("base_model", "micro_batch_size"),
        "axolotl makes TrainingArguments of its keys, with other names: run the file that "
        "`deepspeed` names, or write a file of TrainingArguments (docs/trainer-config.md)",
    ),
)


def check_read(name: str, values: Mapping[str, Any]) -> None:
    """Raise UsageError, with what to do, for a config that is empty, or of a library not read."""
    if not values:
        raise UsageError(
            f"{name} has no keys (allowed: a config of DeepSpeed, accelerate, Lightning, or "
            "TrainingArguments)"
        )
    for config in UNREAD:
        if all(key in values for key in config.keys):
            raise UsageError(
                f"{name} is a config of {config.library}, which zerocheck does not read: "
                f"{config.advice}"
            )
    if name.endswith(TOML):
        libraries = ", ".join(config.library for config in UNREAD)
        raise UsageError(
            f"{name} is TOML, and zerocheck reads configs in JSON and YAML; of those that it does "
            f"not read it knows {libraries}"
        )
