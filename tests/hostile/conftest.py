from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write into the current directory, so each test has one of its own."""
    monkeypatch.chdir(tmp_path)
