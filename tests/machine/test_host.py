"""What is known of this host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerocheck.machine import host
from zerocheck.machine.host import GroupLimit


def test_memory_of_the_machine_and_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapFree: 3 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(host, "memory_limits", lambda: [])
    assert host.total_bytes() == 1000 << 10 and host.available_bytes() == 600 << 10
    assert host.free_swap_bytes() == 3 << 10
    groups = [GroupLimit(500_000, 250_000), GroupLimit(700_000, 600_000)]
    monkeypatch.setattr(host, "memory_limits", lambda: groups)
    assert host.total_bytes() == 500_000 and host.available_bytes() == 100_000


def test_half_of_the_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "total_bytes", lambda: 100)
    monkeypatch.setattr(host, "available_bytes", lambda: 60)
    assert host.leaves(2, 10) and not host.leaves(2, 11)
    monkeypatch.setattr(host, "total_bytes", lambda: None)
    assert host.leaves(2, 1000)


def test_huge_pages_are_asked_for_unless_the_user_says_otherwise() -> None:
    given: dict[str, str] = {}
    host.prefer_huge_pages(given)
    assert given == {"THP_MEM_ALLOC_ENABLE": "1"}
    refused = {"THP_MEM_ALLOC_ENABLE": "0"}
    host.prefer_huge_pages(refused)
    assert refused == {"THP_MEM_ALLOC_ENABLE": "0"}


def test_torch_knows_the_variable() -> None:
    """A release that drops it makes large models slow again, and nothing else would say so."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert b"THP_MEM_ALLOC_ENABLE" in library.read_bytes()
