"""Atomic commit of a checkpoint's files, and detection of damage to them. No torch.

A generation is written next to the current one, in a fresh directory. Its files are synced to disk
before `manifest.json` records their sizes and checksums, and the manifest is synced before the file
`latest` is replaced. That replacement is the one moment at which the new generation becomes
current. Older ones are removed afterwards. A writer that is killed therefore leaves either the old
generation or the new one, whole.

One writer at a time: a second one is refused while the first holds the lock, which the system
releases when the process dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from ....errors import CheckpointError

POINTER = "latest"
LOCK = "lock"
MANIFEST = "manifest.json"
PREFIX = "generation-"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected content of a file: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a generation except the manifest itself."""

    files: dict[str, FileEntry]
    format: Literal[1] = 1


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """Current generation, whose manifest is valid; its files are not verified yet."""

    path: str
    files: dict[str, FileEntry]


# Reading.


def verify(directory: str | os.PathLike[str]) -> FoundCheckpoint:
    """Check every byte of the checkpoint in a directory. Needs no process group.

    Raises CheckpointError if there is none, or it is not as it was written.
    """
    found = find(directory)
    verify_files(found, found.files)
    return found


def find(directory: str | os.PathLike[str]) -> FoundCheckpoint:
    """Find the current checkpoint, with its pointer and its manifest verified.

    Raises CheckpointError if there is none or they are damaged.
    """
    path, checksum = read_pointer(directory)
    manifest = _read(path / MANIFEST)
    if _sha256(manifest) != checksum:
        raise CheckpointError(f"{path / MANIFEST} is damaged, or of another checkpoint")
    files = msgspec.json.decode(manifest, type=Manifest).files
    present = set(os.listdir(path)) - {MANIFEST}
    if missing := sorted(files.keys() - present):
        raise CheckpointError(f"{path} has lost {', '.join(missing)}")
    if foreign := sorted(present - files.keys()):
        raise CheckpointError(f"{path} has files of something else: {', '.join(foreign)}")
    return FoundCheckpoint(str(path), files)


def verify_files(found: FoundCheckpoint, names: Iterable[str]) -> None:
    """Check the named files of a checkpoint. Raises CheckpointError for the first wrong one."""
    for name in names:
        path = Path(found.path, name)
        entry = _entry(_read(path))
        if entry.size != found.files[name].size:
            raise CheckpointError(
                f"{path} has {entry.size} bytes, and had {found.files[name].size} when it was saved"
            )
        if entry != found.files[name]:
            raise CheckpointError(f"{path} is damaged, or of another checkpoint")


def read_pointer(directory: str | os.PathLike[str]) -> tuple[Path, str]:
    """Read the current generation and the checksum of its manifest.

    Raises CheckpointError if there is none, or the pointer is damaged.
    """
    path = Path(directory, POINTER)
    if not path.exists():
        raise CheckpointError(f"there is no whole checkpoint in {directory}: no file {POINTER!r}")
    given = _read(path)
    lines = given.decode("ascii", "replace").split("\n")
    if len(lines) != 4 or _pointer(*lines[:2]) != given:
        raise CheckpointError(f"{path} is damaged")
    return Path(directory, lines[0]), lines[1]


def _pointer(generation: str, checksum: str) -> bytes:
    """Return the bytes of the pointer, which end with their own checksum."""
    text = f"{generation}\n{checksum}\n".encode()
    return text + f"{_sha256(text)}\n".encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _entry(data: bytes) -> FileEntry:
    return FileEntry(len(data), _sha256(data))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Writing.


class Writer:
    """Writer of one generation. One rank calls `begin`, `commit` and `end`; each calls `seal`.

    Raises OSError where a file cannot be written, CheckpointError where another one writes.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._lock: int | None = None
        self._fresh: Path | None = None

    def begin(self) -> str:
        """Take the lock and return the path of a fresh directory for the files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.take_lock()
        self.remove_leftovers()
        self._fresh = self.directory / f"{PREFIX}{secrets.token_hex(8)}"
        self._fresh.mkdir()
        return str(self._fresh)

    def take_lock(self) -> None:
        """Become the only writer, or raise CheckpointError."""
        self._lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another training is saving into {self.directory} now: give each its own directory"
            ) from None

    def remove_leftovers(self) -> None:
        """Remove the leftovers of killed writers, if the current generation is known."""
        with suppress(CheckpointError):
            self.remove_all_but(read_pointer(self.directory)[0])

    def seal(self, path: str, names: Collection[str]) -> dict[str, FileEntry]:
        """Sync these files to disk, and return their entries of the manifest."""
        return {name: self.seal_file(Path(path, name)) for name in names}

    def seal_file(self, path: Path) -> FileEntry:
        """Sync one file to disk, and return its entry of the manifest."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return _entry(file.read())

    def commit(self, files: dict[str, FileEntry]) -> None:
        """Write the manifest, then make the generation current."""
        assert self._fresh is not None
        manifest = msgspec.json.format(msgspec.json.encode(Manifest(files)))
        self.write(self._fresh / MANIFEST, manifest)
        self.sync(self._fresh)
        fresh = self._fresh
        self.publish(fresh.name, _sha256(manifest))
        self.remove_all_but(fresh)

    def publish(self, generation: str, checksum: str) -> None:
        """Replace the pointer atomically, which makes the generation current."""
        fresh = self.directory / f"{POINTER}.new"
        self.write(fresh, _pointer(generation, checksum))
        self.sync(self.directory)  # the generation is on the disk before it is named
        os.replace(fresh, self.directory / POINTER)
        self._fresh = None  # it counts from here on, whatever fails
        self.sync(self.directory)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file and sync it to disk."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, directory: Path) -> None:
        """Sync the names in a directory to disk."""
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_all_but(self, kept: Path) -> None:
        """Remove all other generations. Leave to the next save the ones that cannot be removed."""
        with suppress(OSError):
            for path in self.directory.glob(f"{PREFIX}*"):
                if path.name != kept.name:
                    shutil.rmtree(path, ignore_errors=True)

    def end(self) -> None:
        """Remove the generation if it was not committed, and release the lock."""
        if self._fresh is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
            self._fresh = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
