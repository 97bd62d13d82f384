"""The index of torch.distributed.checkpoint, `.metadata`, read without trust.

It is a pickle, and torch reads it with an ordinary unpickler, which runs whatever a file asks
for. Here a name is looked up only if it stands in the table below: the record classes of
`torch.distributed.checkpoint`, `torch.Size`, dtypes and layouts, paths, and the plain containers.
Anything else is refused by name before it is imported. None of the admitted names does more than
build a value, so a file from elsewhere can be wrong, not harmful.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..errors import UsageError

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {  # of torch before 2.2
        "MEM_FORMAT_ENCODING", "TensorProperties",
    },
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple", "frozenset"},
}  # fmt: skip
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "PurePath"}


class Broken(Exception):
    """The index is no whole pickle of the expected classes."""


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler in Python, not that in C.

    A flipped bit can make an index of the memo, which C keeps in an array as long as its largest
    index: tens of gigabytes for one wrong byte. Here it is a dict.
    """

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return pathlib.PurePosixPath  # a name only; and a Windows path cannot be made here
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise UsageError(
            f"{str(self._path)!r} asks for {module}.{name}, which no index of "
            "torch.distributed.checkpoint needs; nothing of it was executed"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise Broken("it has persistent ids")


def read_metadata(path: Path) -> Metadata:
    """The index in a file.

    Raises UsageError for a pickle that asks for a class that is not admitted, Broken for a file
    that is truncated or damaged.
    """
    try:
        metadata = _Unpickler(path.read_bytes(), path).load()
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise Broken(f"{type(error).__name__}: {error}") from error
    return _whole(metadata)


def _whole(metadata: Any) -> Metadata:
    """Refuse what does not have the form of an index, so that the rest can rely on it."""
    if type(metadata) is not Metadata:
        raise Broken(f"it holds {type(metadata).__name__}, not Metadata")
    try:
        fine = all(map(_is_entry, metadata.state_dict_metadata.items())) and all(
            map(_is_place, (metadata.storage_data or {}).items())
        )
    except (AttributeError, TypeError):
        fine = False
    if not fine:
        raise Broken("its entries have another form than torch writes")
    metadata.storage_data = metadata.storage_data or {}
    return metadata


def _is_entry(item: tuple[Any, Any]) -> bool:
    name, entry = item
    if isinstance(entry, BytesStorageMetadata):
        return isinstance(name, str)
    return (
        isinstance(name, str)
        and isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.properties.dtype, torch.dtype)
        and _sizes(entry.size)
        and all(_sizes(chunk.offsets) and _sizes(chunk.sizes) for chunk in entry.chunks)
    )


def _is_place(item: tuple[Any, Any]) -> bool:
    index, place = item
    return (
        isinstance(index, MetadataIndex)
        and isinstance(index.fqn, str)
        and (index.offset is None or _sizes(index.offset))
        and isinstance(place.relative_path, str)
        and _sizes((place.offset, place.length))
        and min(place.offset, place.length) >= 0
    )


def _sizes(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(number) is int for number in numbers)
