"""Flags and settings that could be meant otherwise are asked about, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile.trials import refused

from zerocheck.errors import UsageError
from zerocheck.run.plan.settings import parse_world_sizes


def test_a_size_without_a_unit() -> None:
    """`--device-memory 40` was 40 bytes."""
    assert "did you mean '40 GiB'?" in refused("memory", "gpt2", "--device-memory", "40")


def test_a_range_of_world_sizes() -> None:
    assert parse_world_sizes("2-4") == (2, 3, 4)
    assert parse_world_sizes("1, 3 - 5,8") == (1, 3, 4, 5, 8)
    for text in ("4-2", "1-100000", "2-", "-", "2-4-6", "2..4"):
        with pytest.raises(UsageError):
            parse_world_sizes(text)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        "tool = 5",
        "n = " + "9" * 5000,
        "[tool.zerocheck]\nseed = 1.5",
        "\x00",
    ],
    ids=range(5),
)
def test_pyproject(tmp_path: Path, text: str) -> None:
    """Deep TOML, numbers of 5,000 digits, and a `tool` that is no table."""
    (tmp_path / "pyproject.toml").write_text(text)
    refused("run", "--profile", "none-such")
    (tmp_path / "known.toml").write_text(text)
    refused("run", "--known-issues", "known.toml", "--profile", "none-such")


@pytest.mark.parametrize(
    "text", ['{"a": ' + "9" * 5000 + "}", '{"a": 1 /* open', "[" * 100_000, '{"a": "b', "5"]
)
def test_deepspeed_configs(tmp_path: Path, text: str) -> None:
    """A number of 5,000 digits and an open comment ended with exit code 3."""
    (tmp_path / "ds.json").write_text(text)
    refused("run", "ds.json")
