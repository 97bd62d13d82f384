"""Files of torch.save, loaded without executing anything and verified by their checksums.

torch.save writes a zip archive and a CRC-32 of every record in it. torch.load does not look at
them: a flipped bit loads in silence. So they are verified here, before anything is loaded. What
would take more time or memory than the size of the file explains is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from .bounded_pickle import Broken, check_pickle
from .source import DamagedCheckpoint

_BLOCK = 1 << 20


class RefusedPickle(UsageError):
    """Error for a pickle that names a class which `weights_only=True` does not admit: `name`."""

    name = ""


class Record:
    """Stand-in for an object of an admitted class, with its attributes."""

    def __init__(self, *given: object) -> None:
        pass


def load(data: Path | bytes, where: str, admitted: Sequence[str] = ()) -> Any:
    """Load a file of torch.save on the CPU; it is mapped into memory, not read whole.

    where: the name of the data in messages; admitted: full names of classes whose objects are
    loaded as `Record`, so that none of their code runs. Raises Damaged for data that is truncated
    or fails its checksum, Refused for other classes than those and what `weights_only=True` admits.
    """
    file: Any = data if isinstance(data, Path) else io.BytesIO(data)
    archive = is_archive(file)
    if archive:
        _verify(file)
    elif not isinstance(data, Path):
        raise DamagedCheckpoint("these bytes are no record of torch.save")
    _check_pickles(file, archive=archive)
    if not isinstance(data, Path):
        file.seek(0)
    try:
        with torch.serialization.safe_globals([(Record, name) for name in admitted]):
            return torch.load(
                file, map_location="cpu", weights_only=True, mmap=archive and isinstance(data, Path)
            )
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        if name is None:
            raise DamagedCheckpoint("its pickle is damaged") from error
        refused = RefusedPickle(
            f"{where} holds an object of {name[1]}, which is not a tensor, number or container; "
            "it was not loaded, since that would run its code"
        )
        refused.name = name[1]
        raise refused from error
    except Exception as error:  # damaged bytes lead to whatever torch stumbles over
        raise DamagedCheckpoint(
            f"torch.load fails: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        ) from error


def is_archive(file: Any) -> bool:
    """Return True for a zip archive, given as a file or its path. Raises Damaged for a torn end."""
    try:
        return zipfile.is_zipfile(file)
    except Exception as error:
        raise DamagedCheckpoint(f"its archive is damaged: {error}") from error


def has_checksums(path: Path) -> bool:
    """Return True if torch.save wrote a CRC-32 for each record of the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(record.CRC for record in archive.infolist())
    except Exception:  # another form, or damaged, which `load` says
        return False


def _verify(file: Any) -> None:
    """Verify the CRC-32 of every record; if all of them are 0, none was written.

    See `torch.serialization.set_crc32_options`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if sum(record.file_size for record in records) > _size(file):
                raise DamagedCheckpoint("its records are larger than the file")
            if not any(record.CRC for record in records):
                return
            for record in records:
                _verify_one(archive, record)
    except DamagedCheckpoint:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise DamagedCheckpoint(f"checksum: {error}") from error
    except Exception as error:  # damaged bytes lead to whatever zipfile stumbles over
        raise DamagedCheckpoint(f"its archive is damaged: {error}") from error


def _size(file: Any) -> int:
    return file.stat().st_size if isinstance(file, Path) else len(file.getbuffer())


_LEGACY_PICKLES = 5
"""Pickles at the start of a file of torch.save that is no archive: magic number, version, system,
object, keys of storages."""


def _check_pickles(file: Any, *, archive: bool) -> None:
    """Raise DamagedCheckpoint for a pickle that is damaged or would take long."""
    try:
        if archive:
            with zipfile.ZipFile(file) as records:
                for record in records.infolist():
                    if record.filename.endswith("/data.pkl"):
                        del record.CRC  # which may not have been written
                        check_pickle(io.BytesIO(records.read(record)))
        else:
            with file.open("rb") as stream:
                for _ in range(_LEGACY_PICKLES):
                    check_pickle(stream)
    except Broken as error:
        raise DamagedCheckpoint(f"its pickle is damaged: {error}") from error
    except Exception as error:  # damaged bytes lead to whatever zipfile stumbles over
        raise DamagedCheckpoint(f"its archive is damaged: {error}") from error


def _verify_one(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as stream:  # raises at its end where the CRC-32 differs
        while stream.read(_BLOCK):
            pass
