"""Faults in the commit of a checkpoint's files, and in the detection of damage."""

from __future__ import annotations

import shutil
from pathlib import Path

from .. import causes as bugs
from ..adapters.textbook.checkpoint.directory import (
    POINTER,
    PREFIX,
    FoundCheckpoint,
    Writer,
    find,
)
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..errors import CheckpointError
from .fault import fault


class _OldRemovedFirst(Writer):
    def remove_leftovers(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class OldRemovedFirst(Zero1):
    """The old checkpoint is removed before the new one exists."""

    writer = _OldRemovedFirst


class _InPlace(Writer):
    """Writer of a single generation, whose files are overwritten."""

    def begin(self) -> str:
        path = super().begin()
        others = [one for one in self.directory.glob(f"{PREFIX}*") if str(one) != path]
        if not others:
            return path
        kept = others[0]
        Path(path).rmdir()
        self._fresh = kept
        for file in kept.iterdir():
            file.unlink()
        return str(kept)


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class WrittenInPlace(Zero2):
    """The new checkpoint is written over the old one's files."""

    writer = _InPlace


class _PointerFirst(Writer):
    def begin(self) -> str:
        path = super().begin()
        (self.directory / POINTER).write_text(f"{Path(path).name}\n")
        return path


@fault(bugs.OLDER_CHECKPOINT_LOST, source="none known", features=("resume-killed", "resume-over"))
class PointerFirst(Zero3):
    """The new checkpoint becomes current before it is whole."""

    writer = _PointerFirst


@fault(bugs.DAMAGED(damage="mix"), source="none known", features=("resume-mix",))
class FilesNotVerified(Zero1):
    """Checksums are written, and never read."""

    def find(self, directory: str) -> FoundCheckpoint:
        return find(directory)


@fault(bugs.DAMAGED(damage="mix"), source="none known", features=("resume-mix",))
class SizesAlone(Zero3):
    """Only the size of each file is checked."""

    def find(self, directory: str) -> FoundCheckpoint:
        found = find(directory)
        for name, entry in found.files.items():
            if Path(found.path, name).stat().st_size != entry.size:
                raise CheckpointError(f"{name} has another size than when it was saved")
        return found
