"""Recognition of the format of a directory or file, by its content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os.path import isfile
from pathlib import Path

from ..errors import UsageError, did_you_mean
from .dcp import INDEX, Dcp
from .deepspeed_files import DeepSpeedFolder, is_deepspeed
from .source import CheckpointSource
from .whole_files import OPENERS, STANDALONE, open_parts

_POINTER = "latest"
_ALLOWED = (
    "allowed: a directory of torch.distributed.checkpoint (.metadata and *.distcp), files of "
    "torch.save (*.pt, *.pth, *.bin, *.ckpt), safetensors files, files of DeepSpeed, a directory "
    "of several of these, or one with a file 'latest' that names one of its folders"
)


def open_checkpoint(path: Path) -> CheckpointSource:
    """Open the checkpoint at a path, a directory or a file.

    Raises UsageError for a missing path, for an unknown format, and for a file that cannot be read
    without executing it.
    """
    if not _exists(path):
        near = did_you_mean(path.name, [one.name for one in _listed(path.parent)])
        raise UsageError(f"there is no checkpoint {str(path)!r}{near}")
    if path.is_file():
        return _open_file(path)
    here = _listed(path)
    names = {one.name for one in here}
    if _is_dcp(names):
        return Dcp(path)
    if any(name.endswith(f"{INDEX}") and name.startswith("__") for name in names):
        raise UsageError(
            f"{str(path)!r} has an index for each rank (saved without collectives), which is "
            "not read yet"
        )
    if is_deepspeed([*names]):
        return DeepSpeedFolder(path)
    if (path / _POINTER).is_file():  # and no FIFO, which would have us wait
        return open_checkpoint(_pointed(path))
    parts = [one for one in here if one.suffix in OPENERS and one.is_file()] + _folders(here)
    alone = [part.name for part in parts if part.suffix == STANDALONE]
    if len(alone) > 1:
        raise UsageError(f"{str(path)!r} has several checkpoints, name one: {_some(alone)}")
    if len(parts) > 1 or any(map(Path.is_file, parts)):
        return open_parts(parts)
    raise UsageError(_unknown(path, here))


def _open_file(path: Path) -> CheckpointSource:
    if path.name == INDEX or path.suffix == ".distcp":
        raise UsageError(
            f"{str(path)!r} is a part of a checkpoint; give its directory, {str(path.parent)!r}"
        )
    if path.suffix not in OPENERS:
        raise UsageError(f"{str(path)!r} is no checkpoint that zerocheck reads ({_ALLOWED})")
    return open_parts([path])


def folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint: that which `latest` names, if there is one."""
    return _pointed(path) if isfile(path / _POINTER) else path


def _pointed(path: Path) -> Path:
    """Return the folder that `latest` names in its first line.

    It must be one of the directory: no path out of it is followed.
    """
    try:
        text = (path / _POINTER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path / _POINTER)!r} cannot be read: {error}") from error
    name = text.partition("\n")[0].strip()
    folders = [one.name for one in _listed(path) if one.is_dir()]
    if name not in folders:
        raise UsageError(
            f"{str(path / _POINTER)!r} names {name[:100]!r}, which is no folder there"
            f"{did_you_mean(name[:100], folders)} (there are: {_some(folders)})"
        )
    return path / name


def _is_dcp(names: Iterable[str]) -> bool:
    return any(name == INDEX or name.endswith(".distcp") for name in names)


def _folders(here: Sequence[Path]) -> list[Path]:
    """Return the folders of shards that are parts of one checkpoint.

    Those whose names differ in numbers only (`step-10`, `step-20`) are checkpoints of their own.
    """
    folders = [
        one for one in here if one.is_dir() and _is_dcp({file.name for file in _listed(one)})
    ]
    names = {re.sub(r"\d+", "", one.name) for one in folders}
    return folders if len(names) == len(folders) else []


def _unknown(path: Path, here: Sequence[Path]) -> str:
    folders = [one.name for one in here if one.is_dir() and _is_one(one)]
    if folders:
        return f"{str(path)!r} holds checkpoints in folders, name one: {_some(folders)}"
    found = f"found: {_some([one.name for one in here])}" if here else "it is empty"
    return f"{str(path)!r} holds no checkpoint that zerocheck reads; {found} ({_ALLOWED})"


def _is_one(path: Path) -> bool:
    return any(one.name == INDEX or one.suffix in (*OPENERS, ".distcp") for one in _listed(path))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "nothing"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError, RuntimeError):  # no file can have that name, or a link to itself
        return False


def _listed(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
