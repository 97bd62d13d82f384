"""Several files and folders as one checkpoint, with the index of a sharded one.

Files of a sharded model (`model-00001-of-00003.safetensors`) are one; others are separate, and
their names without ending (`model`, `optimizer`) come before those of their tensors. Trainers that
shard put folders of torch.distributed.checkpoint beside their files (`optimizer_0`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from ..errors import UsageError, few
from .dcp import Dcp
from .records import RefusedPickle, has_checksums, load
from .safetensors_file import SafetensorsFile
from .source import (
    CheckpointSource,
    DamagedCheckpoint,
    Key,
    MissingFile,
    OpenCheckpoint,
    dotted,
    leaves,
    whole,
    with_values,
)


class TorchSave(OpenCheckpoint):
    """An opened file of torch.save: a state dict, or several in a mapping; see `Source`.

    It is read with `weights_only=True`: tensors, numbers, words and containers, and no classes of
    the user. The tensors are mapped from the file, so memory holds what is looked at.
    """

    format = "torch.save"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._held: dict[Key, torch.Tensor] = {}
        self._name = path.name
        if has_checksums(path):
            self.verified.append("every record of torch.save against its CRC-32")
        else:
            self.unverifiable.append("values (these files of torch.save have no checksums)")
        try:
            found = leaves(load(path, repr(str(path))))
        except DamagedCheckpoint as error:
            self.wrong("readable", path.name, str(error))
            return
        for way, leaf in found:
            key = way or ("the file",)
            if isinstance(leaf, DTensor):
                raise UsageError(
                    f"{str(path)!r} holds the shards of one rank (DTensor); give a full state "
                    "dict, or a directory of torch.distributed.checkpoint"
                )
            if isinstance(leaf, torch.Tensor):
                self._held[key] = leaf
                self.tensors[key] = whole(leaf)
            else:
                self.value(key, leaf)

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`."""
        return with_values(self._held[key])

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        return frozenset({self._name})


STANDALONE = ".ckpt"
"""Suffix of a file that is a checkpoint of its own, as Lightning names them."""
OPENERS: dict[str, Callable[[Path], CheckpointSource]] = {
    ".pt": TorchSave,
    ".pth": TorchSave,
    ".bin": TorchSave,
    STANDALONE: TorchSave,
    ".safetensors": SafetensorsFile,
}
_PART = re.compile(r"(.+)-\d+-of-\d+")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class CheckpointParts(OpenCheckpoint):
    """Opened files of whole tensors, and folders of shards; see `Source`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._from: dict[Key, tuple[CheckpointSource, Key, str]] = {}
        opened: dict[Path, CheckpointSource] = {}
        refused: list[RefusedPickle] = []
        unread: dict[str, list[str]] = {}
        for path in paths:
            try:
                opened[path] = Dcp(path) if path.is_dir() else OPENERS[path.suffix](path)
            except RefusedPickle as error:
                refused.append(error)
                unread.setdefault(error.name, []).append(path.name)
        if refused and not any(source.tensors for source in opened.values()):
            raise refused[0]
        for name, files in unread.items():
            self.notes.append(f"{few(files)} not read: loading {name} would run its code")
        self.format = " and ".join(sorted({source.format for source in opened.values()}))
        stems = {path: _stem(path) for path in paths}
        several = len(set(stems.values())) > 1
        for path, source in opened.items():
            self._take(source, path, (stems[path],) if several else ())
        for directory in {path.parent for path in paths}:
            self._indices(directory, opened)
        if len(paths) > 1:
            what = "folders" if all(map(Path.is_dir, paths)) else "files"
            self.unverifiable.append(f"that all {what} are of one save (they name none)")

    def _take(self, source: CheckpointSource, path: Path, above: Key) -> None:
        self.ordered = self.ordered and source.ordered
        folder = f"{path.name}/" if path.is_dir() else ""
        for one in source.findings:
            where = folder * (one.check == "files") + one.where
            file = one.file and folder + one.file
            self.wrong(one.check, where, one.detail, file=file)
        self.notes += source.notes
        self.verified += [one for one in source.verified if one not in self.verified]
        self.unverifiable += [one for one in source.unverifiable if one not in self.unverifiable]
        for key, stored in source.tensors.items():
            full = above + key
            if full in self.tensors:
                self.wrong("tiling", dotted(full), "two files hold it")
                continue
            self.tensors[full] = stored
            self._from[full] = (source, key, folder)
        for key, value in source.values.items():
            self.values[above + key] = value

    def _indices(self, directory: Path, opened: dict[Path, CheckpointSource]) -> None:
        for path in sorted(filter(Path.is_file, directory.glob("*.index.json"))):
            try:
                index = msgspec.json.decode(path.read_bytes(), type=_Index)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.wrong("files", path.name, f"it is damaged: {error}")
                continue
            self._compare(index.weight_map, path.name, {p.name: s for p, s in opened.items()})

    def _compare(
        self, places: dict[str, str], index: str, opened: dict[str, CheckpointSource]
    ) -> None:
        """Compare the index of a sharded model with the content of its files."""
        files = set(places.values())
        for file in sorted(files - set(opened)):
            count = sum(place == file for place in places.values())
            self.wrong("files", file, f"it is missing, with {count} tensors ({index})")
        held = {
            dotted(key): file
            for file, source in opened.items()
            if file in files
            for key in source.tensors
        }
        for name, file in places.items():
            if file in opened and held.get(name) != file:
                where = f"; {held[name]} holds it" if name in held else ""
                self.wrong("files", name, f"{index} names {file}, which lacks it{where}")
        for name in held.keys() - places.keys():
            self.wrong("files", name, f"it is in {held[name]}, and {index} does not name it")

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`."""
        source, inner, folder = self._from[key]
        try:
            return source.read(inner)
        except MissingFile as error:
            raise MissingFile(folder + error.file) from None

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        source, inner, folder = self._from[key]
        return frozenset(folder + file for file in source.files_of(inner))


def _stem(path: Path) -> str:
    part = _PART.fullmatch(path.stem)
    return part[1] if part else path.stem


def open_parts(paths: Sequence[Path]) -> CheckpointParts:
    """Open files and folders; raises UsageError for one that cannot be read at all."""
    try:
        return CheckpointParts(paths)
    except OSError as error:
        raise UsageError(
            f"{error.filename or paths[0]} cannot be read: {error.strerror}"
        ) from error
