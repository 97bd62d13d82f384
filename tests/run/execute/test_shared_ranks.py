"""Shared ranks: one pool for all callers, until it is closed."""

from __future__ import annotations

import pytest

from zerocheck import pytest_plugin
from zerocheck.run.execute import shared_ranks


class Started:
    """Stand-in for a pool, which costs seconds to start."""

    def __init__(self, implementations: list[str]) -> None:
        self.implementations = implementations
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_one_pool_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ranks, "_pool", None)
    monkeypatch.setattr(shared_ranks, "start_ranks", Started)
    shared_ranks.close()  # of none
    first = shared_ranks.shared_ranks("deepspeed1")
    assert isinstance(first, Started) and first.implementations == ["deepspeed1"]
    assert shared_ranks.shared_ranks("fsdp2") is first
    shared_ranks.close()
    assert first.closed and shared_ranks.shared_ranks("fsdp2") is not first


def test_they_end_with_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Started([])
    monkeypatch.setattr(shared_ranks, "_pool", pool)
    pytest_plugin.pytest_unconfigure()
    assert pool.closed
