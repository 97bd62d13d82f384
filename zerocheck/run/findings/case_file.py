"""Case files, which findings leave behind for `zerocheck replay`. Plain JSON, no code."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...case.codec import from_plain, parse
from ...case.validity import check
from ...errors import UsageError
from ...protocol.verdicts import Obligation
from ..records.journal import encode
from ..records.records import CaseFile, Environment
from .bug import Bug

FORMAT = 1
"""Version of the case file; the case in it has its own."""

LARGEST = 16 << 20
"""Bytes; a case file is a few kilobytes."""


def write(folder: Path, name: str, case_file: CaseFile) -> Path:
    """Write folder/name.json atomically, without overwriting another finding's; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    number = 1
    while path.exists():  # two files of a user may both have a `build`
        number += 1
        path = folder / f"{name}-{number}.json"
    data = msgspec.json.format(encode(case_file), indent=2)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(data + b"\n")
    os.replace(temporary, path)
    return path


def of_bug(bug: Bug, environment: Environment, obligations: tuple[Obligation, ...]) -> CaseFile:
    """Return the case file of the smallest known case of a bug."""
    replayed = bug.replayed
    return CaseFile(
        implementation=replayed.implementation,
        case=replayed.case,
        status=replayed.status,
        judgement=replayed.judgement,
        environment=environment,
        title=bug.title,
        confirmed=bug.confirmed,
        tries=bug.tries,
        obligations=obligations,
    )


def read(path: Path) -> CaseFile:
    """Read and validate a case file.

    Raises UsageError, with the error and its place, for a file that is missing, truncated, of
    another format version, or asks for the impossible.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{path} is larger than {LARGEST >> 20} MiB; it is not a case file")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    raw = parse(data, source=str(path))
    if not isinstance(raw, dict) or "case" not in raw:
        raise UsageError(f"{path} is not a case file: it has no field 'case'")
    version = raw.get("format", FORMAT)
    if version != FORMAT:
        raise UsageError(
            f"{path} has case file format {version!r}; this zerocheck knows format {FORMAT}"
        )
    case = from_plain(raw["case"], source=f"the case in {path}")
    check(case)
    try:
        return msgspec.convert(raw, CaseFile, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is not a case file: {error}") from None
