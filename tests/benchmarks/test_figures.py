"""Each benchmark replaces its own section of the figures, and no other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import HEAD, keep, read


def test_a_benchmark_replaces_its_own_section(tmp_path: Path) -> None:
    path = tmp_path / "figures.md"
    keep("test_speed", ["one\n", "two"], path)
    keep("test_cost", ["\n  W = 1    W = 2\n-------"], path)
    before = read(path)
    keep("test_speed", ["three"], path)
    after = read(path)
    assert path.read_text().startswith(HEAD)
    assert list(after) == ["test_cost", "test_speed"]
    assert after["test_cost"].strip() == before["test_cost"].strip()
    assert "  W = 1    W = 2" in after["test_cost"]
    assert "three" in after["test_speed"] and "two" not in after["test_speed"]
    assert "one\n\ntwo" in before["test_speed"]


def test_it_says_on_what_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "figures.md"
    keep("test_speed", ["one"], path)
    assert "cores (" in path.read_text() and "load average" in path.read_text()
