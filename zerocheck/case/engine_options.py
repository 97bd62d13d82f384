"""Options that only one library's implementations have: DeepSpeed's engine, torch's FSDP.

They are drawn by the seed of the case and not by choices of their own, so that all other choices
stay what they are; and not at all for an implementation that does not name them in its `options`.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from .schema import Sharding

DEEPSPEED: dict[str, tuple[Any, ...]] = {
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
"""Field of `case.sharding` -> its values, the default first. One that stands twice is drawn twice
as often."""

FSDP: dict[str, tuple[Any, ...]] = {
    "offload": ("none",) * 8 + ("pageable", "pageable", "pinned"),
}
"""The same for FSDP1 and FSDP2."""

DRAWN = {**DEEPSPEED, **FSDP}
"""All of them."""


def drawn(seed: int) -> dict[str, Any]:
    """Draw the options of a case with this seed."""
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    return {name: values[int(source.random() * len(values))] for name, values in DRAWN.items()}


def plain(obeyed: Collection[str] | None) -> dict[str, Any]:
    """Return the defaults of the options that are not obeyed. None: obeyed options unknown."""
    default = Sharding()
    return {name: getattr(default, name) for name in DRAWN if name not in (obeyed or ())}
