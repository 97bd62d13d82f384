"""A manifest of the files of one save, `manifest.json`, as zerocheck's textbook sharders write it.

    {"files": {"__0_0.distcp": {"size": 4096, "sha256": "..."}, ...}}

Nothing else distinguishes a file of another save with equal shapes and steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .result import CheckpointProblem

NAME = "manifest.json"


class _ManifestEntry(msgspec.Struct):
    size: int
    sha256: str


class _Manifest(msgspec.Struct):
    files: dict[str, _ManifestEntry]


def check(directory: Path) -> Iterator[CheckpointProblem] | None:
    """Verify every file by the manifest of a directory; None where it has no such manifest."""
    try:
        manifest = msgspec.json.decode((directory / NAME).read_bytes(), type=_Manifest)
    except (OSError, ValueError, RecursionError):  # of another program, or none
        return None
    return _differences(directory, manifest)


def _differences(directory: Path, manifest: _Manifest) -> Iterator[CheckpointProblem]:
    there = {one.name: one for one in directory.iterdir() if one.is_file()}
    for name, entry in manifest.files.items():
        detail = ""
        if name not in there:
            detail = f"it is missing, and {NAME} names it"
        elif there[name].stat().st_size != entry.size:
            detail = f"it has {there[name].stat().st_size} bytes, and {entry.size} in {NAME}"
        else:
            with there[name].open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    detail = f"it is damaged or of another save: its sha256 is not that in {NAME}"
        if detail:
            yield CheckpointProblem(check="files", where=name, detail=detail)
