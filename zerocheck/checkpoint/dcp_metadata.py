"""The index of torch.distributed.checkpoint, `.metadata`, read without trust.

It is a pickle, and torch reads it with an ordinary unpickler, which runs whatever a file asks for.
Here a name is looked up only if it is in the table below: the record classes of
`torch.distributed.checkpoint`, `torch.Size`, dtypes and layouts, paths, and the plain containers.
Anything else is refused by name before it is imported. None of the admitted names does more than
build a value, none is an object of the pickle itself, and only instances of the record classes are
filled in, so a file from elsewhere can be wrong, not harmful.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from ..errors import UsageError
from .bounded_pickle import BoundedUnpickler, Broken, check_arguments

_METADATA = "torch.distributed.checkpoint.metadata"
_DATA = (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, OldProperties, StorageMeta,
    TensorProperties, TensorStorageMetadata, _StorageInfo,
)  # fmt: skip
"""The data classes of an index: the only ones whose instances are filled in (BUILD)."""
_MADE: dict[tuple[str, str], Callable[..., Any]] = {
    **{(one.__module__, one.__name__): one for one in _DATA},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    (OldProperties.__module__, "MEM_FORMAT_ENCODING"): MEM_FORMAT_ENCODING,  # torch before 2.2
    ("collections", "OrderedDict"): dict,
    ("collections", "defaultdict"): lambda *_: {},
    **{("builtins", one.__name__): one for one in (dict, list, set, tuple, frozenset)},
}
"""(module, name) as they stand in an index, to the class or function that it may call."""
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "PurePath"}


class _Name:
    """Admitted name in place of a class or function.

    The class or function itself is never an object of the pickle, so nothing in it can be changed
    by the pickle, and it is called with plain values only.
    """

    def __init__(self, made: Callable[..., Any]) -> None:
        self.made = made


class _Unpickler(BoundedUnpickler):
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _Name(pathlib.PurePosixPath)  # a name; no Windows path can be made here
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        made = _MADE.get((module, name))
        if made is not None:
            return _Name(made)
        raise UsageError(
            f"{str(self._path)!r} asks for {module}.{name}, which no index of "
            "torch.distributed.checkpoint needs; nothing of it was executed"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise Broken("it has persistent ids")

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(_made(self.stack.pop(), args))

    def _newobj(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if args == () and isinstance(name, _Name) and name.made in _DATA:
            self.stack.append(object.__new__(name.made))
        else:
            self.stack.append(_made(name, args))

    def _build(self) -> None:
        state = self.stack.pop()
        _filled_in(self.stack[-1], state)

    def _refuse(self) -> None:
        raise Broken("it has an instruction that no index needs")

    dispatch: ClassVar[dict[int, Any]] = {
        **BoundedUnpickler.dispatch,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
        pickle.BUILD[0]: _build,
        **dict.fromkeys(
            (
                pickle.NEWOBJ_EX[0], pickle.INST[0], pickle.OBJ[0], pickle.EXT1[0],
                pickle.EXT2[0], pickle.EXT4[0], pickle.BYTEARRAY8[0],
            ),
            _refuse,
        ),
    }  # fmt: skip


def _made(name: Any, args: Any) -> Any:
    if not isinstance(name, _Name) or not isinstance(args, tuple):
        raise Broken("it calls what is no name")
    check_arguments(args)
    return name.made(*args)


def _filled_in(instance: Any, state: Any) -> None:
    """Set the fields of an instance of a data class, and nothing else of it."""
    kind = type(instance)
    if kind not in _DATA:
        raise Broken(f"it changes {kind.__name__}, which is no record of an index")
    if kind in (TensorProperties, OldProperties):
        if not isinstance(state, tuple):
            raise Broken("it has tensor properties of another form")
        instance.__setstate__(state)
        return
    known = {field.name for field in fields(kind)}
    if not isinstance(state, dict) or not state.keys() <= known:
        raise Broken(f"it has fields that {kind.__name__} has not")
    if kind is MetadataIndex and not _is_index(state):
        raise Broken("it has an index of another form")
    vars(instance).update(state)


def read_metadata(path: Path) -> Metadata:
    """Read the index in a file.

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
    """Refuse data that do not have the form of an index, so that the rest can rely on it."""
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


def _is_index(state: dict[str, Any]) -> bool:
    """Return True for plain fields, of which Python makes a hash in their own time."""
    return (
        isinstance(state.get("fqn", ""), str)
        and isinstance(state.get("index"), int | None)
        and (state.get("offset") is None or _sizes(state["offset"]))
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
