"""Whole vectors lie in memory or in files, and are the same."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from zerocheck.errors import HarnessError
from zerocheck.judge import vectors


@pytest.fixture(params=["memory", "huge pages", "files"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vectors, "LARGE_BYTES", 1)
    monkeypatch.setattr(vectors, "AT_ONCE", 3)
    monkeypatch.setattr(vectors, "HUGE_BYTES", 1 if request.param == "huge pages" else 1 << 40)
    monkeypatch.setattr(vectors, "leaves", lambda *_: request.param != "files")
    return str(request.param)


@pytest.mark.usefixtures("where")
def test_they_are_what_torch_gives() -> None:
    assert vectors.zeros(2, 3, dtype=torch.float64).tolist() == [[0.0] * 3] * 2
    numbers = torch.arange(10, dtype=torch.bfloat16)
    wide = vectors.copy(numbers, torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide, numbers.float())
    assert vectors.joined([wide[:2], wide[:0], wide[7:]]).tolist() == [0, 1, 7, 8, 9]
    assert not len(vectors.joined([])) and not len(vectors.joined([wide[:0]]))
    index = torch.tensor([8, 0, 3])
    assert torch.equal(vectors.taken(wide, index), wide[index])
    mask = torch.tensor([True, False, False, True, True, False, True])
    assert torch.equal(vectors.positions(mask), mask.nonzero().reshape(-1))
    assert vectors.positions(mask[1:3]).tolist() == []
    assert vectors.ranges([4, 9, 0], [2, 0, 3]).tolist() == [4, 5, 0, 1, 2]


def test_a_file_has_no_name_and_goes_with_its_tensor(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = vectors.zeros(1000)
    assert (str(tmp_path) in _area(made)) == (where == "files") and not os.listdir(tmp_path)
    del made
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def _area(vector: torch.Tensor) -> str:
    """Return the line of /proc/self/maps that a vector lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= vector.data_ptr() < high:
            return line
    raise AssertionError("its memory is not found")


def test_what_a_vector_leaves_is_the_next_ones(where: str) -> None:
    """Of its size; and together they never take more than vectors that were there at once."""
    kept = vectors._in_files if where == "files" else vectors._in_memory
    vectors.zeros(1000)
    assert not kept.has(4000), "nobody asked for it"
    with vectors.reused():
        _reuse(kept, where)
    assert not kept.has(4000) and not kept.has(4004)


def _reuse(kept: vectors._Reused, where: str) -> None:
    first, second = vectors.zeros(1000), vectors.zeros(1000)
    there = {first.data_ptr(), second.data_ptr()}  # 8,000 bytes
    part = first[10:]
    del first, second
    third = vectors.empty(1000)
    assert where == "memory" or (
        third.data_ptr() in there and third.data_ptr() != part.data_ptr() - 40
    )
    part.fill_(1.0)
    third.fill_(2.0)
    assert part.sum() == 990
    del part
    assert where == "memory" or kept.has(4000)
    fourth = vectors.empty(1001)  # 8,004 bytes of 8,000 that were there at once, and 4,000 kept
    assert not kept.has(4000), "kept, and more than ever"
    del third, fourth
    assert where == "memory" or (kept.has(4000) and kept.has(4004))


def test_long_ones_lie_in_huge_pages() -> None:
    """The kernel is asked for them, and gives them to what begins at one."""
    made = vectors.zeros(3 << 20)
    assert made.data_ptr() % (2 << 20) == 0 and made.shape == (3 << 20,)
    area = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            area = "ours" if low <= made.data_ptr() < high else ""
        elif area and line.startswith("VmFlags:"):
            assert "hg" in line.split(), line
            return
    pytest.fail("its memory is not found")


def test_small_ones_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "leaves", lambda *_: pytest.fail("asked"))
    vectors.zeros(1000)


def test_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "LARGE_BYTES", 1)
    monkeypatch.setattr(vectors, "leaves", lambda *_: False)
    with pytest.raises(HarnessError, match=r"no room for a vector of .* MiB in .*; set TMPDIR"):
        vectors.empty(1 << 46)
