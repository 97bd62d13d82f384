"""Directories of torch.distributed.checkpoint: `.metadata` and files of records, `*.distcp`.

No process group and none of the user's classes are needed. The index says for each chunk of each
tensor its file, first byte and length; the bytes are a record of torch.save.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..errors import UsageError
from .bounded_pickle import Broken
from .dcp_metadata import read_metadata
from .records import RefusedPickle, load
from .result import CheckpointProblem
from .source import (
    DamagedCheckpoint,
    Key,
    MissingFile,
    OpenCheckpoint,
    Stored,
    StoredBox,
    dotted,
    leaves,
    shape_problem,
    whole,
    with_values,
)

INDEX = ".metadata"


class Dcp(OpenCheckpoint):
    """An opened directory of torch.distributed.checkpoint; see `Source`."""

    format = "torch.distributed.checkpoint"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._names: dict[Key, str] = {}
        self._files: dict[str, mmap.mmap] = {}
        self._held: dict[Key, torch.Tensor] = {}
        self._places: dict[Any, Any] = {}
        metadata = self._metadata()
        if metadata is not None:
            self._places = metadata.storage_data
            self._entries(metadata)
            self.findings += _misplaced(metadata)
            self.findings += _files(directory, metadata)
            self._verify_together()

    def _verify_together(self) -> None:
        """Verify the files by a manifest of their save, if there is one; record what it covers."""
        self.verified.append("the index against the files, and every record against its CRC-32")
        differences = check_manifest(self._directory)
        if differences is not None:
            self.verified.append(f"every file against {MANIFEST}")
            self.findings += differences
            return
        self.unverifiable.append(
            "that all files are of one save: they hold no name of it, so a file of another save "
            "with equal shapes and steps looks right"
        )
        self.notes += dates(self._directory, {one.relative_path for one in self._places.values()})

    def _metadata(self) -> Metadata | None:
        if not (self._directory / INDEX).is_file():
            self.wrong("files", INDEX, "it is missing: the save did not end")
            return None
        try:
            metadata = read_metadata(self._directory / INDEX)
        except Broken as error:
            self.wrong("files", INDEX, f"it is damaged or truncated ({error})")
            return None
        if any(getattr(place, "transform_descriptors", None) for place in _places(metadata)):
            raise UsageError(
                f"{str(self._directory)!r} is stored through extensions of the writer "
                "(compression, for example); only plain records are read"
            )
        return metadata

    def _entries(self, metadata: Metadata) -> None:
        ways = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        entries = metadata.state_dict_metadata
        self.ordered = ways.keys() >= entries.keys()
        # The planner's order is that of the state dict; the index has sharded tensors first.
        for name in dict.fromkeys([*(way for way in ways if way in entries), *entries]):
            entry = entries[name]
            key = _key(ways.get(name), name)
            self._names[key] = name
            if isinstance(entry, TensorStorageMetadata):
                problem = shape_problem(entry.size, entry.properties.dtype)
                if problem:
                    self.wrong("readable", dotted(key), problem)
                    continue
                chunks = [StoredBox(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks]
                self.tensors[key] = Stored(tuple(entry.size), entry.properties.dtype, tuple(chunks))
            elif isinstance(entry, BytesStorageMetadata):
                self._value(key, name)

    def _value(self, key: Key, name: str) -> None:
        place = self._places.get(MetadataIndex(name))
        if place is None:
            return  # `_misplaced` says so
        try:
            tree = load(self._bytes(place), f"the entry {name!r}")
            for inner, leaf in leaves(tree):
                leaf_key = key + inner
                self._names[leaf_key] = name
                if isinstance(leaf, torch.Tensor):
                    self._held[leaf_key] = leaf
                    self.tensors[leaf_key] = whole(leaf)
                else:
                    self.value(leaf_key, leaf)
        except RefusedPickle as error:
            self.notes.append(str(error))
        except DamagedCheckpoint as error:
            self.wrong("readable", dotted(key), str(error), file=error.file)

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`: chunk by chunk into one tensor."""
        if key in self._held:
            return with_values(self._held[key])
        stored, name = self.tensors[key], self._names[key]
        self._check_room(stored, name)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        damaged: list[str] = []
        files: set[str] = set()
        for chunk in stored.chunks:
            try:
                tensor[chunk.slices] = self._part(name, chunk, stored)
            except DamagedCheckpoint as error:
                damaged.append(f"{_box(chunk, stored)}{error}")
                files.add(error.file)
            except (RuntimeError, IndexError) as error:
                raise DamagedCheckpoint("a chunk is out of the bounds of its tensor") from error
        if len(files) == 1 and "" not in files:
            raise MissingFile(*files)
        if damaged:
            raise DamagedCheckpoint("; ".join(damaged))
        return tensor

    def _part(self, name: str, chunk: StoredBox, stored: Stored) -> torch.Tensor:
        """Read one chunk. Raises DamagedCheckpoint, with the file."""
        place = self._places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise DamagedCheckpoint("the index does not say where a chunk lies")
        data = self._bytes(place)
        try:
            part = load(data, f"the entry {name!r}")
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"in {place.relative_path}: {error}") from error
        if not isinstance(part, torch.Tensor):
            raise DamagedCheckpoint(f"a chunk is no tensor but {type(part).__name__}")
        if tuple(part.shape) != chunk.sizes or part.dtype != stored.dtype:
            raise DamagedCheckpoint(
                f"the chunk at {list(chunk.offsets)} is {_form(part.shape, part.dtype)} in "
                f"{place.relative_path}, {_form(chunk.sizes, stored.dtype)} in the index"
            )
        return part

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        name = self._names[key]
        return frozenset(
            place.relative_path for index, place in self._places.items() if index.fqn == name
        )

    def _check_room(self, stored: Stored, name: str) -> None:
        """Raise Damaged for a tensor that is larger than its records, before it takes memory."""
        places = [self._places.get(MetadataIndex(name, one.offsets)) for one in stored.chunks]
        room = sum(place.length for place in places if place is not None)
        if stored.nbytes > room:
            raise DamagedCheckpoint(f"it takes {stored.nbytes} bytes, and its records have {room}")

    def _bytes(self, place: Any) -> bytes:
        name = place.relative_path
        if name not in self._files:
            path = self._directory / name
            if not _inside(self._directory, name):
                raise DamagedCheckpoint(f"its file {name} is missing")
            if not path.is_file():
                raise MissingFile(name)
            if not path.stat().st_size:
                raise DamagedCheckpoint(f"its file {name} is empty")
            try:
                with path.open("rb") as file:
                    self._files[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise DamagedCheckpoint(
                    f"its file {name} cannot be read: {error.strerror}"
                ) from error
        end = place.offset + place.length
        if end > len(self._files[name]):
            raise DamagedCheckpoint(f"its file {name} is truncated")
        return self._files[name][place.offset : end]


def _key(way: object, name: str) -> Key:
    """Return the planner's path of an entry, or its name where there is none."""
    if isinstance(way, tuple) and way and all(isinstance(part, str | int) for part in way):
        return way
    return (name,)


def _places(metadata: Metadata) -> list[Any]:
    return list(metadata.storage_data.values())


def _box(chunk: StoredBox, stored: Stored) -> str:
    """Say which part of a tensor a chunk is; nothing if it is all of it."""
    if chunk.sizes == stored.shape:
        return ""
    parts = [
        f"{'rows' if dim == 0 else f'dim {dim}'} {start} to {start + size - 1} of {whole}"
        for dim, (start, size, whole) in enumerate(
            zip(chunk.offsets, chunk.sizes, stored.shape, strict=True)
        )
        if size != whole
    ]
    return f"{', '.join(parts)} "


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _inside(directory: Path, name: str) -> bool:
    """Return True if a file that the index names is in the directory of the checkpoint.

    No way out of it is followed. A name that no file can have, or a link to itself, is in none.
    """
    try:
        path = (directory / name).resolve()
        path.is_file()
    except (OSError, ValueError, RuntimeError):
        return False
    return path.is_relative_to(directory.resolve())


def _misplaced(metadata: Metadata) -> Iterator[CheckpointProblem]:
    """Entries without a place in a file, and places without an entry."""
    wanted = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        else:
            wanted.add(MetadataIndex(name))
    for index in wanted - set(metadata.storage_data):
        yield CheckpointProblem(
            check="files", where=_spot(index), detail="the index gives no place for it"
        )
    for index in set(metadata.storage_data) - wanted:
        yield CheckpointProblem(
            check="files", where=_spot(index), detail="it has a place in a file, but no entry"
        )


def _spot(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn} at {list(index.offset)}"


def _files(directory: Path, metadata: Metadata) -> Iterator[CheckpointProblem]:
    """Yield findings for files that are missing, not in the index, or of another size."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for place in _places(metadata):
        ranges.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name, records in sorted(ranges.items()):
        detail = _file(directory, name, sorted(records))
        if detail:
            yield CheckpointProblem(check="files", where=name, detail=detail)
    for path in sorted(directory.iterdir()):
        if path.suffix == ".distcp" and path.name not in ranges:
            yield CheckpointProblem(
                check="files", where=path.name, detail="no entry is in it: is it of another save?"
            )
        elif path.name.endswith(".metadata.tmp"):
            yield CheckpointProblem(
                check="files", where=path.name, detail="left behind by a save that did not end"
            )


def _file(directory: Path, name: str, records: list[tuple[int, int]]) -> str:
    if not _inside(directory, name):
        return (
            "the index names it, and it is outside of the directory, or no file can have that "
            "name; it was not read"
        )
    path = directory / name
    if not path.is_file():
        return f"it is missing, with {len(records)} records"
    size = path.stat().st_size
    end = 0
    for offset, length in records:
        if offset < end:
            return f"two records overlap at byte {offset}"
        if offset > end:
            return f"bytes {end} to {offset} belong to no record"
        end = offset + length
    if size < end:
        return f"truncated: {size} bytes of {end}"
    return f"{size - end} bytes behind its last record" if size > end else ""


MANIFEST = "manifest.json"
"""Manifest of the files of one save, as zerocheck's textbook sharders write it.

    {"files": {"__0_0.distcp": {"size": 4096, "sha256": "..."}, ...}}

Nothing else distinguishes a file of another save with equal shapes and steps.
"""


class _ManifestEntry(msgspec.Struct):
    size: int
    sha256: str


class _Manifest(msgspec.Struct):
    files: dict[str, _ManifestEntry]


def check_manifest(directory: Path) -> Iterator[CheckpointProblem] | None:
    """Verify every file by the manifest of a directory; None where it has no such manifest."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, ValueError, RecursionError):  # of another program, or none
        return None
    return _differences(directory, manifest)


def _differences(directory: Path, manifest: _Manifest) -> Iterator[CheckpointProblem]:
    there = {one.name: one for one in directory.iterdir() if one.is_file()}
    for name, entry in manifest.files.items():
        detail = ""
        if name not in there:
            detail = f"it is missing, and {MANIFEST} names it"
        elif there[name].stat().st_size != entry.size:
            detail = f"it has {there[name].stat().st_size} bytes, and {entry.size} in {MANIFEST}"
        else:
            with there[name].open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    detail = (
                        f"it is damaged or of another save: its sha256 is not that in {MANIFEST}"
                    )
        if detail:
            yield CheckpointProblem(check="files", where=name, detail=detail)


_INDEX = ".metadata"
_MARGIN_S = 60.0
"""Clocks of hosts, and copying a directory file by file, differ by less."""


def dates(directory: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield notes on files that were changed long after the index, which a save writes last.

    No finding: a copy has dates of its own.
    """
    try:
        index = (directory / _INDEX).stat().st_mtime
    except OSError:
        return
    for name in sorted(names):
        try:
            changed = (directory / name).stat().st_mtime
        except (OSError, ValueError):
            continue
        if changed > index + _MARGIN_S:
            yield (
                f"{name} was changed at {_date(changed)}, after the index ({_date(index)}), which "
                "a save writes last: it was copied here later, or is of another save"
            )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
