"""Damage to files: what was said is what was done, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocheck.case.schema import DamageKind
from zerocheck.run.execute.segments import damage


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """(a checkpoint, an older one) of three files each, one of which is the same in both."""
    for folder, text in (("new", "bbbb"), ("old", "aaaa")):
        path = tmp_path / folder / "part"
        path.mkdir(parents=True)
        (path / "tensors").write_text(text)
        (path / "moments").write_text(text)
        (path / "format").write_text("1")
        (path / "empty").write_text("")
    return tmp_path / "new", tmp_path / "old"


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["flip", "truncate", "remove", "mix"])
def test_one_file_is_damaged(both: tuple[Path, Path], kind: DamageKind, seed: int) -> None:
    new, old = both
    before = contents(new)
    message = damage(new, kind, seed, older=old)
    after = contents(new)
    changed = [name for name in before if after.get(name) != before[name]]
    assert len(changed) == 1 and changed[0] in message and changed[0] != "empty"
    if kind == "flip":
        one, other = before[changed[0]], after[changed[0]]
        assert sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) == 1
    if kind == "mix":
        assert after[changed[0]] == b"aaaa"


def test_the_same_seed_does_the_same(both: tuple[Path, Path]) -> None:
    new, old = both
    message = damage(new, "flip", 3, older=old)
    assert damage(new, "flip", 3, older=old) == message  # flipped back
    assert contents(new)["tensors"] == b"bbbb"


def test_nothing_is_mixed_where_nothing_differs(both: tuple[Path, Path]) -> None:
    new, _ = both
    assert damage(new, "mix", 0, older=new) == ""


def test_one_file_of_an_older_checkpoint_that_makes_it_whole_is_no_mix(
    both: tuple[Path, Path],
) -> None:
    new, old = both
    for directory in both:
        (directory / "part" / "moments").unlink()
    before = contents(new)
    assert damage(new, "mix", 0, older=old) == "" and contents(new) == before
    (new / "part" / "more").write_text("b")
    assert "tensors" in damage(new, "mix", 0, older=old)
