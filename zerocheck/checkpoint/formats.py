"""Recognition of the format of a directory or file, by its content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError, did_you_mean
from .dcp import INDEX, Dcp
from .source import CheckpointSource
from .whole_files import OPENERS, open_files

_POINTER = "latest"
_ALLOWED = (
    "allowed: a directory of torch.distributed.checkpoint (.metadata and *.distcp), files of "
    "torch.save (*.pt, *.pth, *.bin), safetensors files, or a directory with a file 'latest' that "
    "names one of its folders"
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
    if INDEX in names or any(name.endswith(".distcp") for name in names):
        return Dcp(path)
    if any(name.endswith(f"{INDEX}") and name.startswith("__") for name in names):
        raise UsageError(
            f"{str(path)!r} has an index for each rank (saved without collectives), which is "
            "not read yet"
        )
    _not_deepspeed(path, names)
    if (path / _POINTER).is_file():  # and no FIFO, which would have us wait
        return open_checkpoint(_pointed(path))
    files = [one for one in here if one.suffix in OPENERS and one.is_file()]
    if files:
        return open_files(files)
    raise UsageError(_unknown(path, here))


def _open_file(path: Path) -> CheckpointSource:
    if path.name == INDEX or path.suffix == ".distcp":
        raise UsageError(
            f"{str(path)!r} is a part of a checkpoint; give its directory, {str(path.parent)!r}"
        )
    if path.suffix not in OPENERS:
        raise UsageError(f"{str(path)!r} is no checkpoint that zerocheck reads ({_ALLOWED})")
    return open_files([path])


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


def _not_deepspeed(path: Path, names: set[str]) -> None:
    ends = ("_model_states.pt", "_optim_states.pt")
    below = {one.name for one in path.glob("*/*_states.pt")} if _POINTER in names else set()
    if any(name.endswith(ends) for name in names | below):
        raise UsageError(
            f"{str(path)!r} is a checkpoint of DeepSpeed, which comes later; what its "
            "zero_to_fp32.py writes, the parameters in files of torch.save, can be checked"
        )


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
