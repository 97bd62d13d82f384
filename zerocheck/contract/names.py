"""Names of parameters: those of the unwrapped model, whatever wraps it."""

from __future__ import annotations

WRAPPERS = (
    "module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
)
"""Prefixes that DDP, FSDP1, activation checkpointing and torch.compile put into names."""


def unwrapped(name: str) -> str:
    """The name without the prefixes of wrappers: `module.blocks.0.weight` is `blocks.0.weight`.

    `module.` is stripped at the front only, since a model may have a child of that name.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for prefix in WRAPPERS[1:]:
        name = name.replace(prefix, "")
    return name
