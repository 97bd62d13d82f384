"""Case files, which findings leave behind for `zerocheck replay`. Plain JSON, no code."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...case.codec import from_plain, parse
from ...case.schema import Case
from ...case.validity import check
from ...catalogue import command_name, is_built_in
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
    check_folder(folder)
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


def check_folder(folder: Path) -> None:
    """Raise UsageError if something else than a folder has the name of one for case files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"{folder} is a file, and case files are written into a folder of that name; move it "
            "away, or give another --report-dir"
        )


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
        causes=bug.causes,
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


def read_for_replay(
    path: Path,
    *,
    implementation: str | None = None,
    model: str | None = None,
    optimizer: str | None = None,
) -> CaseFile:
    """Read a case file whose case is about to run, with the user's code that the command names.

    Without `implementation` only built-in ones are run: no code is imported that only the file
    names. Raises UsageError as `read`, and where the command does not name what the file needs.
    """
    file = read(path)
    if implementation is None:
        not_without_asking(path, file.implementation)
    user = file.case.model.user
    if user is not None and model is None:
        raise UsageError(
            f"{path} names the model {user.factory}; say so again to let its code run: "
            f"--model {command_name(user.factory)}"
        )
    if user is None and model is not None:
        raise UsageError(f"--model: the model of {path} is zerocheck's own; leave --model out")
    _check_optimizer(path, file.case, optimizer)
    return file


def not_without_asking(path: Path, name: str) -> None:
    """Raise UsageError for an implementation that only the file names, and is not built in."""
    if not is_built_in(name):
        raise UsageError(
            f"{path} names {name}; say so again to let its code run: "
            f"--implementation {command_name(name)}"
        )


def _check_optimizer(path: Path, case: Case, given: str | None) -> None:
    """Raise UsageError unless the user's optimizer of a case, if it has one, is named again."""
    user = case.optimizer.user
    if user is not None and given is None:
        raise UsageError(
            f"{path} names the optimizer {user.location}; say so again to let its code run: "
            f"--optimizer {command_name(user.location)}"
        )
    if user is None and given is not None:
        raise UsageError(
            f"--optimizer: the optimizer of {path} is {case.optimizer.kind}; leave --optimizer out"
        )
