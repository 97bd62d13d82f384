"""Files become a checkpoint at one moment, and damage to any of them is seen. Without ranks."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zerocheck
from zerocheck.adapters.textbook.checkpoint import directory
from zerocheck.adapters.textbook.checkpoint.directory import Writer, read_pointer, verify
from zerocheck.errors import CheckpointError

FILES = {"__0_0.distcp": b"tensors of rank 0", "__1_0.distcp": b"of rank 1", "empty": b""}


def written(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Write a checkpoint; its generation."""
    writer = Writer(str(folder))
    path = Path(writer.begin())
    for name, data in (FILES if files is None else files).items():
        (path / name).write_bytes(data)
    writer.commit(writer.seal(str(path), FILES.keys()))
    writer.end()
    return path


def files_of(folder: Path) -> list[Path]:
    """All files, without the lock."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_what_is_written_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        verify(tmp_path / "missing")
    path = written(tmp_path / "deep" / "folder")
    found = verify(tmp_path / "deep" / "folder")
    assert found.path == str(path) and found.files.keys() == FILES.keys()
    assert found.files["empty"].size == 0


def test_the_older_one_goes_after_the_newer_one_counts(tmp_path: Path) -> None:
    old = written(tmp_path)
    writer = Writer(str(tmp_path))
    fresh = Path(writer.begin())
    assert verify(tmp_path).path == str(old)
    writer.end()
    assert not fresh.exists()
    assert verify(tmp_path).path == str(old)
    new = written(tmp_path)
    assert verify(tmp_path).path == str(new) and not old.exists()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """At once if it is known what counts, else when a new one counts."""
    (tmp_path / "generation-killed").mkdir()
    writer = Writer(str(tmp_path))
    writer.begin()
    assert (tmp_path / "generation-killed").exists()
    writer.end()
    kept = written(tmp_path)
    assert not (tmp_path / "generation-killed").exists()
    (tmp_path / "generation-killed").mkdir()
    (tmp_path / "latest.new").write_bytes(b"half a poin")
    writer.begin()
    assert not (tmp_path / "generation-killed").exists() and kept.exists()
    writer.end()
    written(tmp_path)
    assert [path.name for path in files_of(tmp_path)].count("latest") == 1
    assert not (tmp_path / "latest.new").exists()


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    first = Writer(str(tmp_path))
    path = Path(first.begin())
    second = Writer(str(tmp_path))
    with pytest.raises(CheckpointError, match="another training is saving"):
        second.begin()
    second.end()
    assert path.exists()
    (path / "one").write_bytes(b"1")
    first.commit(first.seal(str(path), ["one"]))
    first.end()
    assert verify(tmp_path).path == str(path)
    written(tmp_path)


def test_a_flipped_bit_is_seen_in_every_byte(tmp_path: Path) -> None:
    written(tmp_path)
    draw = random.Random(0)
    for path in files_of(tmp_path):
        right = path.read_bytes()
        for place in range(len(right)):
            wrong = bytearray(right)
            wrong[place] ^= 1 << draw.randrange(8)
            path.write_bytes(wrong)
            with pytest.raises(CheckpointError):
                verify(tmp_path)
        path.write_bytes(right)
    verify(tmp_path)


def test_every_length_is_seen(tmp_path: Path) -> None:
    written(tmp_path)
    for path in files_of(tmp_path):
        right = path.read_bytes()
        for wrong in (*(right[:end] for end in range(0, len(right), 7)), right + b"\0"):
            path.write_bytes(wrong)
            with pytest.raises(CheckpointError):
                verify(tmp_path)
        path.unlink()
        with pytest.raises(CheckpointError):
            verify(tmp_path)
        path.write_bytes(right)
    verify(tmp_path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    (path / "__2_0.distcp").write_bytes(b"of rank 2 of another checkpoint")
    with pytest.raises(CheckpointError, match=r"files of something else: __2_0\.distcp"):
        verify(tmp_path)


def test_files_of_two_checkpoints_are_refused_in_every_mixture(tmp_path: Path) -> None:
    """All but the two that are whole, with a generation under the name of the other."""
    one, two = tmp_path / "one", tmp_path / "two"
    first = written(one)
    second = written(two, {name: data[::-1] for name, data in FILES.items()})
    second = second.rename(two / first.name)
    pointer = two / "latest"
    checksum = read_pointer(two)[1]
    pointer.write_bytes(directory._pointer(first.name, checksum))
    assert verify(two).path == str(second)
    places = [path.relative_to(one) for path in files_of(one)]
    for bits in range(1, 2 ** len(places) - 1):
        mixed = tmp_path / f"mixed{bits}"
        shutil.copytree(one, mixed)
        for number, place in enumerate(places):
            if bits >> number & 1:
                shutil.copy(two / place, mixed / place)
        if any(_equal(mixed, whole, places) for whole in (one, two)):
            continue  # the file that is empty in both makes no mixture
        with pytest.raises(CheckpointError):
            verify(mixed)


def _equal(one: Path, other: Path, places: list[Path]) -> bool:
    return all((one / place).read_bytes() == (other / place).read_bytes() for place in places)


def test_random_damage_of_several_bytes(tmp_path: Path) -> None:
    written(tmp_path)
    draw = random.Random(0)
    for _ in range(100):
        path = draw.choice([path for path in files_of(tmp_path) if path.name != "empty"])
        right = path.read_bytes()
        wrong = bytearray(right)
        start = draw.randrange(len(right))
        wrong[start : start + draw.randint(1, 9)] = draw.randbytes(draw.randint(0, 9))
        if wrong != right:
            path.write_bytes(wrong)
            with pytest.raises(CheckpointError):
                verify(tmp_path)
            path.write_bytes(right)


def test_the_pointer_names_what_it_should(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_pointer(tmp_path)[0] == path


def test_verifying_needs_no_torch() -> None:
    code = (
        "import zerocheck.adapters.textbook.checkpoint.directory, sys; "
        "assert 'torch' not in sys.modules"
    )
    root = Path(zerocheck.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(root)})
