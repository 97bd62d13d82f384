"""Functions that are replaced for a step are put back, in whatever order the steps end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from zerocheck.attached.record.guard import replaced


def noting(word: str) -> Callable[[Any], Any]:
    return lambda original: lambda: [word, *original()]


class Owner:
    def call(self) -> list[str]:
        return []


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
@pytest.mark.parametrize("owner", [Owner(), SimpleNamespace(call=list)])
def test_contexts_end_in_any_order(owner: Any, order: tuple[str, ...]) -> None:
    before = dict(vars(owner))
    stacks = {word: ExitStack() for word in "abc"}
    for word, stack in stacks.items():
        stack.enter_context(replaced(owner, "call", noting(word)))
    active = ["c", "b", "a"]
    for word in order:
        assert owner.call() == active
        stacks[word].close()
        active.remove(word)
    assert owner.call() == [] and vars(owner) == before
