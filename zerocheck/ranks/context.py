"""Context of a job: the rank that its target runs in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerocheck.machine.devices import CPU
from zerocheck.ranks.messages import Leak

if TYPE_CHECKING:
    from zerocheck.ranks.arena import Arena
    from zerocheck.ranks.progress import Progress


@dataclass
class Condition:
    """The state of a rank after a job, as the target says.

    leaks: global state that the job left changed; collectives: how many the rank has called, by the
    name of the process group.
    """

    leaks: list[Leak] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)

    def leaked(self, words: str, *, undone: bool) -> None:
        """Say what was left changed; undone: it is again as before the job."""
        self.leaks.append(Leak(words, undone))


@dataclass(frozen=True)
class RankContext:
    """The second argument of every target.

    `arena` takes tensors that the parent may read; `progress` says where this rank stands. The
    default process group is initialised and spans exactly the `world_size` ranks of the job.
    `device`: the one that this rank is on, "cpu" or "cuda:0". `condition`: where the target says
    in which state it leaves this process.
    """

    rank: int
    world_size: int
    arena: Arena
    progress: Progress
    device: str = CPU
    condition: Condition = field(default_factory=Condition)


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


def prepare(target: Target, preparation: bytes) -> None:
    """Call `prepare(preparation)` of the target's module, if it has one, in the process that ranks
    are forked from: it does once what each of them would do at its first job."""
    function: Callable[[bytes], object] | None
    function = getattr(sys.modules[target.__module__], "prepare", None)
    if function is not None:
        function(preparation)
