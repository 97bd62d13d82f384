"""Benchmarks print their figures though pytest captures what tests print."""

from __future__ import annotations

import pytest
from benchmarks.measuring import Show


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def shown(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return shown
