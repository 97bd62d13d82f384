"""What a job's target is told about the rank that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerocheck.devices import CPU

if TYPE_CHECKING:
    from zerocheck.ranks.arena import Arena
    from zerocheck.ranks.progress import Progress


@dataclass(frozen=True)
class RankContext:
    """The second argument of every target.

    `arena` takes tensors that the parent may read; `progress` says where this rank stands. The
    default process group is initialised and spans exactly the `world_size` ranks of the job.
    `device`: the one that this rank is on, "cpu" or "cuda:0".
    """

    rank: int
    world_size: int
    arena: Arena
    progress: Progress
    device: str = CPU


Target = Callable[[bytes, RankContext], bytes]


def load_target(target: str) -> Target:
    """The function that "package.module:function" names.

    Raises ImportError, AttributeError or ValueError when there is none.
    """
    import importlib

    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"a target is written 'package.module:function', not {target!r}")
    function: Target = getattr(importlib.import_module(module), name)
    return function
