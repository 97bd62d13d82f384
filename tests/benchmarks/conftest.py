"""Benchmarks print their figures, though pytest captures what tests print, and keep them."""

from __future__ import annotations

import pytest
from benchmarks.figures import keep
from benchmarks.measuring import Show


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Show:
    texts: list[str] = []

    def shown(text: str) -> None:
        texts.append(text)
        keep(request.node.name, texts)
        with capsys.disabled():
            print(text, flush=True)

    return shown
