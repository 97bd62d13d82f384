"""Faults in waiting: the data read depend on timing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fault import injected
from .call import CollectiveCall
from .reductions import InGradients

PATIENCE_S = 1e-3
"""Seconds until a wait gives up. Ranks that are in step need less, delayed ones more."""


@injected("gradient", source="DS PR#5606", features=("delays",), sometimes=0.5)
class WaitTimesOut(InGradients):
    """A wait for a reduction gives up after a millisecond, unnoticed.

    The caller reads its local gradient; the result arrives later, perhaps too late.
    """

    acts_on = "sums of gradients that are waited for by a Work"

    def __init__(self) -> None:
        super().__init__()
        self._late: list[threading.Thread] = []

    def changes(self, call: CollectiveCall) -> bool:
        return not call.functional and super().changes(call)

    def around(self, call: CollectiveCall) -> Any:
        local = [one.clone() for one in call.local_of(call.given)]
        first, into = call.first, call.aside()
        for one, mine in zip(into, local, strict=True):
            one.copy_(mine.view_as(one))
        over = threading.Event()
        thread = threading.Thread(target=_arrive, args=(call, call.start(), into, over))
        thread.start()
        self._late.append(thread)
        over.wait(PATIENCE_S)
        return call.done(first)

    def end(self) -> None:
        for thread in self._late:
            thread.join()
        self._late.clear()


def _arrive(
    call: CollectiveCall, result: Any, into: Sequence[Tensor], over: threading.Event
) -> None:
    """Wait for the call, and store its result where the caller reads it, if that still exists."""
    call.finish(result)
    with torch.no_grad():
        for one, got in zip(into, call.got, strict=True):
            if one.untyped_storage().nbytes():
                one.copy_(got)
    over.set()
