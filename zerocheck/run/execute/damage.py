"""Damage to the files of a checkpoint, as disks and people cause it. Determined by a seed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from ...case.schema import DamageKind


def damage(directory: Path, kind: DamageKind, seed: int, *, older: Path) -> str:
    """Damage one file of a checkpoint; return the damage in words ("" if none is possible).

    older: another checkpoint of the same training, from which `mix` takes a file. Empty files are
    skipped, and so are files that are equal in both checkpoints. Where one file is all that
    differs, nothing can be mixed: with it in place the older checkpoint would be there, whole.
    """
    source = random.Random(seed)
    files = _files(directory)
    if kind == "mix":
        return _mix(directory, files, older, source)
    if not files:
        return ""
    path = files[int(source.random() * len(files))]
    name = path.relative_to(directory)
    size = path.stat().st_size
    if kind == "remove":
        path.unlink()
        return f"{name} removed"
    if kind == "truncate":
        kept = int(source.random() * size)
        os.truncate(path, kept)
        return f"{name} cut to {kept} of {size} bytes"
    return flip(path, int(source.random() * size * 8), str(name))


def flip(path: Path, bit: int, name: str) -> str:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    return f"bit {bit % 8} of byte {bit // 8} of {name} flipped"


def _mix(directory: Path, files: list[Path], older: Path, source: random.Random) -> str:
    """Replace a file by the one with its name in the older checkpoint."""
    others = {path.name: path for path in _files(older)}
    fitting = [
        path
        for path in files
        if path.name in others and others[path.name].read_bytes() != path.read_bytes()
    ]
    if not fitting or (len(fitting) == 1 and {path.name for path in files} == set(others)):
        return ""
    path = fitting[int(source.random() * len(fitting))]
    shutil.copyfile(others[path.name], path)
    return f"{path.relative_to(directory)} replaced by that of the checkpoint before"


def _files(directory: Path) -> list[Path]:
    """Return the files of the directory that are not empty."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
