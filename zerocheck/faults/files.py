"""Faults in how files become a checkpoint, and in how damage to them is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..implementations.textbook.checkpoint.directory import POINTER, PREFIX, Found, Writer, find
from ..implementations.textbook.zero1 import Zero1
from ..implementations.textbook.zero2 import Zero2
from ..implementations.textbook.zero3 import Zero3


class _OldRemovedFirst(Writer):
    def remove_leftovers(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()


class OldRemovedFirst(Zero1):
    """Room is made for the new checkpoint before it is there. Flagged: older checkpoint lost."""

    writer = _OldRemovedFirst


class _InPlace(Writer):
    """One generation for good, whose files are written anew."""

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


class WrittenInPlace(Zero2):
    """The new checkpoint is written over the old one's files. Flagged: older checkpoint lost."""

    writer = _InPlace


class _PointerFirst(Writer):
    def begin(self) -> str:
        path = super().begin()
        (self.directory / POINTER).write_text(f"{Path(path).name}\n")
        return path


class PointerFirst(Zero3):
    """The new checkpoint is named before it is whole. Flagged: older checkpoint lost."""

    writer = _PointerFirst


class FilesNotVerified(Zero1):
    """Checksums are written, and never read. Flagged: flip, mix."""

    def find(self, directory: str) -> Found:
        return find(directory)
