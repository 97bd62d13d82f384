"""Tests of what is left out of collections."""

from __future__ import annotations

import gc

import pytest

from zerocheck.machine import garbage


def test_what_was_frozen_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks in each measured case, and counting goes through all that it has imported."""
    monkeypatch.setattr(garbage, "_kept", False)  # and so it is again after this test
    kept = [object]
    garbage.freeze()
    assert not any(one is kept for one in gc.get_objects())
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    assert garbage.is_frozen()


@pytest.mark.parametrize("count", [0, 7])
def test_what_others_froze_counts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(garbage, "_kept", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count)
    assert garbage.is_frozen() is bool(count)
