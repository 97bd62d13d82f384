"""Random delays, which reorder ranks: races show that a quiet machine hides."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..case.schema import Case
from .collectives import CollectiveTrace


class Delays:
    """Sleeps up to `disturbance.delay` milliseconds, drawn per rank from the case's seed."""

    def __init__(self, case: Case, rank: int) -> None:
        self._random = random.Random(case.seed * 1024 + rank)
        self._longest = case.disturbance.delay / 1000

    def pause(self, *_: Any) -> None:
        """Sleep; not at all in a case without delays."""
        if self._longest:
            time.sleep(self._random.random() * self._longest)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Within it, each collective and each step of a torch optimizer is delayed."""
        if not self._longest:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(CollectiveTrace(self.pause))
            hook = register_optimizer_step_pre_hook(self.pause)
            stack.callback(hook.remove)
            yield
