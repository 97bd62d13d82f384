"""What is known of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocheck import host


def test_memory_of_the_machine_and_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:   1000 kB\nMemAvailable:   600 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(host, "_GROUP", str(tmp_path / "memory"))
    assert host.total_bytes() == 1000 << 10 and host.available_bytes() == 600 << 10
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 20000\ninactive_file 30000\n")
    assert host.total_bytes() == 500000 and host.available_bytes() == 250000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.total_bytes() == 1000 << 10 and host.available_bytes() == 600 << 10


def test_half_of_the_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "total_bytes", lambda: 100)
    monkeypatch.setattr(host, "available_bytes", lambda: 60)
    assert host.leaves_half(10) and not host.leaves_half(11)
    monkeypatch.setattr(host, "total_bytes", lambda: None)
    assert host.leaves_half(1000)
