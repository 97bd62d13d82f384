"""Journal of a run: one record per line (NDJSON), written the moment it is known.

A bus delivers each record to the journal first, then to the other handlers.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from ...errors import UsageError
from ...foreign_text import encodable
from ...machine import signals
from . import previous_runs
from .matrix_records import FaultsStarted, MatrixRecord
from .records import JOURNAL_FORMAT, Coverage, Record, RunStarted

Note = Callable[[str], None]
R = TypeVar("R")

_LAST_DATE = 253_402_300_799 - 86_400
"""Seconds since the epoch, a day before the end of the year 9999."""

SYNC_SECONDS = 2.0
"""At most this much of a run is lost when the machine stops; a killed process loses nothing."""

# Lax, since numbers that JSON cannot hold stand as strings: see `encode`.
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record, strict=False)
_matrix_decoder: msgspec.json.Decoder[MatrixRecord] = msgspec.json.Decoder(
    MatrixRecord, strict=False
)


_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"}$')


class LineSums:
    """Checksums of the lines of a journal, each of its line and of the checksum before it.

    They show what was changed, moved or left out. Whoever makes new ones can still write what he
    likes: nothing is signed.
    """

    def __init__(self) -> None:
        self._last = b""
        self.missing = 0
        """Lines without one."""

    def _next(self, line: bytes) -> bytes:
        self._last = hashlib.blake2b(self._last + line, digest_size=8).hexdigest().encode()
        return self._last

    def added(self, line: bytes) -> bytes:
        """Return a JSON object with its checksum as the last field."""
        return line[:-1] + b',"sum":"' + self._next(line) + b'"}'

    def check(self, where: str, line: bytes) -> None:
        """Raise UsageError if the line has a checksum that is not its own."""
        found = _SUM.search(line)
        if found is None:
            self.missing += 1
        elif self._next(line[: found.start()] + b"}") != found[1]:
            raise UsageError(
                f"{where}: it, or the line before it, is not as it was written (checksum)"
            )


def encode(value: Any) -> bytes:
    """Encode a record or struct as JSON; inf and nan as the strings "inf" and "nan".

    msgspec writes them as null, which a field of type float would not read back.
    """
    return msgspec.json.encode(_finite(msgspec.to_builtins(value)))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return encodable(value)
        case dict():
            return {encodable(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


class Journal:
    """Writer of a new journal, locked so that two runs never share one.

    It takes its name with its first record, so that a run that is refused leaves the previous_runs
    journal alone; that one is kept then (see previous_runs.py).
    """

    def __init__(self, path: Path) -> None:
        """Open the journal.

        Raises UsageError if the file cannot be written, another run is writing it, or it is
        something else than a journal.
        """
        self.path = path
        self.begun = False
        """Whether it has its name, and a record."""
        self._made = path.with_name(f"{path.name}.new")
        with ExitStack() as undo:
            with signals.deferred():  # an interrupt comes where it is undone
                self._open()
                undo.callback(self._file.close)
                self._lock(self._file)
                undo.callback(self._made.unlink)
                if path.is_file():  # and no FIFO, which would have us wait
                    with path.open("rb") as other:
                        self._lock(other)
                previous_runs.check_name(path)
            undo.pop_all()
        self._file.truncate(0)
        self._sums = LineSums()
        self._synced = time.monotonic()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(
                self._made,
                os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK,
                0o666,  # less the umask
            )
        except OSError as error:
            raise UsageError(f"cannot write to {self._made}: {error.strerror}") from error
        self._file = os.fdopen(handle, "ab")

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another run is writing {self.path}; give this one its own --report-dir"
            ) from None

    def handle(self, record: msgspec.Struct) -> None:
        """Append one line.

        It is handed to the operating system when this returns, so that a kill does not lose it.
        """
        self._file.write(self._sums.added(encode(record)) + b"\n")
        self._file.flush()
        if not self.begun:
            previous_runs.keep(self.path)
            try:
                os.replace(self._made, self.path)
            except FileNotFoundError:
                raise UsageError(
                    f"{self.path.parent} was removed while the run began; run again"
                ) from None
            self.begun = True
        now = time.monotonic()
        if now - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = now

    def close(self) -> None:
        """Flush everything to disk. A second call does nothing."""
        if self._file.closed:
            return
        os.fsync(self._file.fileno())
        if not self.begun:
            self._made.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: Path, note: Note | None = None, *, summed: bool = False) -> list[Record]:
    """Read all records of a journal, which may be compressed with xz.

    summed: every line must have its checksum; one that is there must be right anyway. A last line
    without its end, as a kill leaves it, is dropped and reported to `note`. Raises UsageError, with
    the line number, for another format version or anything else.
    """
    return _read(path, _decode, note, summed=summed)


def read_matrix(path: Path, note: Note | None = None) -> list[MatrixRecord]:
    """Read all records of the journal of a kill matrix, as `read` does for a run."""
    return _read(path, _decode_matrix, note)


def is_matrix(path: Path) -> bool:
    """Return True if the first line of the file is that of a kill matrix's journal."""
    try:
        with path.open("rb") as file:
            first = msgspec.json.decode(file.readline())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("type") == FaultsStarted.__struct_config__.tag


MOST_UNPACKED = 1000
"""Times the size of an xz file to which it may unpack; journals of thousands of cases: 20 to 50."""


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a journal, which may be compressed.

    Raises UsageError for a file that cannot be read or unpacks to more than a journal can.
    """
    try:
        data = path.read_bytes()
        if path.suffix != ".xz":
            return data
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        unpacked = unpacker.decompress(data, MOST_UNPACKED * len(data))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise UsageError(f"cannot read {path}: it is no whole xz file") from error
    if len(unpacked) >= MOST_UNPACKED * len(data):
        raise UsageError(f"cannot read {path}: it unpacks to over {MOST_UNPACKED} times its size")
    if not unpacker.eof:
        raise UsageError(f"cannot read {path}: it is no whole xz file")
    return unpacked


def _read(
    path: Path, decode: Callable[[Path, int, bytes], R], note: Note | None, *, summed: bool = False
) -> list[R]:
    data = read_bytes(path)
    *lines, rest = data.split(b"\n")
    sums, records = LineSums(), list[R]()

    def take(line: bytes) -> None:
        number = len(records) + 1
        record = decode(path, number, line)
        sums.check(f"{path}, line {number}", line)
        records.append(record)

    for line in lines:
        take(line)
    if rest:
        try:
            take(rest)
        except UsageError:
            if not records:
                raise
            if note is not None:
                note(f"{path}: line {len(lines) + 1} is torn and was dropped")
    if not records:
        raise UsageError(f"{path} holds no records")
    if summed and sums.missing:
        lines_have = "1 line has" if sums.missing == 1 else f"{sums.missing} lines have"
        raise UsageError(
            f"{path}: {lines_have} no checksum: it was changed, or is of an older zerocheck; run "
            "its cases again"
        )
    return records


def _decode(path: Path, number: int, line: bytes) -> Record:
    where = f"{path}, line {number}"
    try:
        if number == 1:
            _check_format(where, line)
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not a record of a journal: {error}") from error
    _check_values(where, record)
    if (number == 1) is not isinstance(record, RunStarted):
        raise UsageError(f"{where}: a journal starts with 'run started', and has it once")
    return record


def _decode_matrix(path: Path, number: int, line: bytes) -> MatrixRecord:
    where = f"{path}, line {number}"
    try:
        record = _matrix_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not a record of a kill matrix: {error}") from error
    _check_values(where, record)
    if (number == 1) is not isinstance(record, FaultsStarted):
        raise UsageError(f"{where}: a kill matrix starts with 'faults started', and has it once")
    return record


def _check_values(where: str, record: object) -> None:
    """Raise UsageError for a date that no calendar has, and for malformed pairs of features."""
    if isinstance(record, RunStarted | FaultsStarted) and not 0 <= record.started <= _LAST_DATE:
        raise UsageError(f"{where}: it started at {record.started:g}, which is no date")
    if isinstance(record, Coverage):
        for bits in (record.supported, *(one.pairs for one in record.refused)):
            if not re.fullmatch(r"[0-9a-f]*", bits):
                raise UsageError(f"{where}: {bits[:40]!r} are no pairs of features")


def _check_format(where: str, line: bytes) -> None:
    """Raise UsageError for a format of another version, before its fields are looked at."""
    first = msgspec.json.decode(line)
    given = first.get("format", JOURNAL_FORMAT) if isinstance(first, dict) else JOURNAL_FORMAT
    if given != JOURNAL_FORMAT:
        raise UsageError(
            f"{where}: journal format {given!r}; this zerocheck reads format {JOURNAL_FORMAT}"
        )


class Handler(Protocol):
    """Receiver of each record of a run, in order."""

    def handle(self, record: Record) -> None:
        """Take one record. An exception from here ends the run."""


@runtime_checkable
class Watching(Protocol):
    """Handler that shows what a run does while it has no records."""

    def begins(self, activity: str) -> None:
        """Note what the run does from now on: "building mine.py:f on 8 ranks"."""


class Bus:
    """Delivery of each record to every handler, in the order of the handlers.

    The journal is first, so that nothing is shown that is not written down.
    """

    def __init__(self, handlers: Iterable[Handler]) -> None:
        self._handlers = tuple(handlers)

    def handle(self, record: Record) -> None:
        """Deliver `record` to all handlers."""
        for handler in self._handlers:
            handler.handle(record)

    def begins(self, activity: str) -> None:
        """Tell those handlers that show progress what is done now, before any case."""
        for handler in self._handlers:
            if isinstance(handler, Watching):
                handler.begins(activity)
