"""Position of each rank, in shared memory: written in a microsecond, read without locks.

One record per rank. A reader may catch a record half written; it reads again until two readings
agree, and a text that is torn all the same harms nobody.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from zerocheck.machine.host import reserve

RECORD_BYTES = 1024
_WHERE = struct.Struct("<Q384s")  # counter and text at 0
_COLLECTIVE = struct.Struct("<Q120s")  # sequence number and name at 512
_COLLECTIVE_AT = 512
_COUNTER = struct.Struct("<Q")
_JOB = struct.Struct("<QQ")  # sequence begun, offset of its output in the log, at 768
_JOB_AT = 768
_FINISHED_AT = 784  # 1 + sequence of the last job that was replied to; 1 after joining
_RAISED_AT = 792  # sequence of the last job that raised, or left the rank unfit
_COLLECTIVES_AT = (800, 808)  # collectives called in groups of all ranks, see `counted`
_RECENT = struct.Struct("<II")  # sequence number of a collective and digest of its name, at 816
_RECENT_AT = 816
_RECENT_PLACES = 26
_NO_RECENT = bytes(_RECENT_PLACES * _RECENT.size)
_write_where = _WHERE.pack_into
_write_collective = _COLLECTIVE.pack_into
_write_number = _COUNTER.pack_into
_write_recent = _RECENT.pack_into

Buffer = mmap.mmap | bytearray


class Progress:
    """The rank's own record."""

    __slots__ = ("_at", "_count", "_page")

    def __init__(self, page: Buffer | None = None, rank: int = 0) -> None:
        """With no page, the record is private: targets can be run without a parent."""
        self._page: Buffer = bytearray(RECORD_BYTES) if page is None else page
        self._at = rank * RECORD_BYTES if page is not None else 0
        self._count = 0

    def at(self, where: str) -> None:
        """Say what the rank does now, e.g. "step 2, microbatch 1, forward" (384 bytes)."""
        self._count += 1
        _write_where(self._page, self._at, self._count, where.encode("utf-8", "replace"))

    def collective(self, name: str, sequence: int) -> None:
        """Say which collective is entered, and its number in this rank."""
        page, at = self._page, self._at
        self._count += 1
        text = name.encode("utf-8", "replace")
        place = at + _RECENT_AT + sequence % _RECENT_PLACES * _RECENT.size
        _write_recent(page, place, sequence & 0xFFFFFFFF, zlib.crc32(text))
        _write_collective(page, at + _COLLECTIVE_AT, sequence, text)
        _write_number(page, at, self._count)

    def begin(self, sequence: int, log_offset: int) -> None:
        """A job starts: forget where the last one was."""
        self.at("")
        _write_collective(self._page, self._at + _COLLECTIVE_AT, 0, b"")
        start = self._at + _RECENT_AT
        self._page[start : start + len(_NO_RECENT)] = _NO_RECENT
        _JOB.pack_into(self._page, self._at + _JOB_AT, sequence, log_offset)

    def raised(self, sequence: int) -> None:
        """A job raised here, or left this rank unfit. To be called before the reply is sent."""
        _write_number(self._page, self._at + _RAISED_AT, sequence)

    def counted(self, sequence: int, collectives: Mapping[str, int]) -> None:
        """Say how many collectives this rank had called at the end of a job, as of
        `context.Condition`.

        Only those are compared that all ranks have: of the default group, and the number of groups.
        A rank may be a job ahead of another that still has to compare, so two jobs have places.
        """
        common = [collectives.get(name, 0) for name in ("", "0")]
        digest = zlib.crc32(repr(common).encode())
        _write_number(self._page, self._at + _COLLECTIVES_AT[sequence % 2], digest)

    def finish(self, sequence: int) -> None:
        """A job's reply is sent. Number 0 stands for joining the process group."""
        _write_number(self._page, self._at + _FINISHED_AT, sequence + 1)


class RankPosition(NamedTuple):
    """A reading of one record. `collective` is empty when none was entered.

    recent: of the last 26 collectives, the digest of the name by sequence number.
    """

    counter: int
    where: str
    collective: str
    collective_sequence: int
    begun: int
    log_offset: int
    recent: dict[int, int]


class Board:
    """The records of all ranks of a team, in a file that all of them map."""

    def __init__(self, path: str, world_size: int, *, create: bool = False) -> None:
        """Raises OSError when the file cannot be made or mapped."""
        self.world_size = world_size
        size = world_size * RECORD_BYTES
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                reserve(descriptor, size)
            self.page = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def counter(self, rank: int) -> int:
        value: int = _COUNTER.unpack_from(self.page, rank * RECORD_BYTES)[0]
        return value

    def read(self, rank: int) -> RankPosition:
        start = rank * RECORD_BYTES
        record = self.page[start : start + RECORD_BYTES]
        for _ in range(3):
            again = self.page[start : start + RECORD_BYTES]
            if again == record:
                break
            record = again
        return position(record)

    def begun(self, rank: int) -> int:
        """Sequence number of the last job that the rank started."""
        value: int = _COUNTER.unpack_from(self.page, rank * RECORD_BYTES + _JOB_AT)[0]
        return value

    def all_finished(self, sequence: int) -> bool:
        """Return True if every rank has replied to job `sequence`, or has joined if that is 0."""
        unpack = _COUNTER.unpack_from
        return all(
            unpack(self.page, rank * RECORD_BYTES + _FINISHED_AT)[0] > sequence
            for rank in range(self.world_size)
        )

    def agree(self, sequence: int) -> bool:
        """Return True if all ranks had called as many collectives at the end of a job.

        To be asked when all have finished it, by a rank that has not begun the next but one.
        """
        at = _COLLECTIVES_AT[sequence % 2]
        starts = range(at, at + self.world_size * RECORD_BYTES, RECORD_BYTES)
        return len({_COUNTER.unpack_from(self.page, start) for start in starts}) == 1

    def any_raised(self, after: int, before: int) -> bool:
        """Return True if a job raised on some rank, or left it unfit.

        after, before: sequence numbers between which it was, both exclusive.
        """
        unpack = _COUNTER.unpack_from
        return any(
            after < unpack(self.page, rank * RECORD_BYTES + _RAISED_AT)[0] < before
            for rank in range(self.world_size)
        )


def position(record: bytes) -> RankPosition:
    """Read the record of a rank, of RECORD_BYTES."""
    counter, where = _WHERE.unpack_from(record, 0)
    sequence, name = _COLLECTIVE.unpack_from(record, _COLLECTIVE_AT)
    begun, offset = _JOB.unpack_from(record, _JOB_AT)
    recent = dict(_RECENT.iter_unpack(record[_RECENT_AT : _RECENT_AT + len(_NO_RECENT)]))
    recent.pop(0, None)  # of places not yet written
    return RankPosition(counter, _text(where), _text(name), sequence, begun, offset, recent)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "ignore")
