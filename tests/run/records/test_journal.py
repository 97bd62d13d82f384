"""The journal: round trip, torn lines, other formats."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hand_made import VIOLATION, case, failed, finding, held, started

from zerocheck.errors import UsageError
from zerocheck.run.records.journal import Journal, encode, read
from zerocheck.run.records.records import CaseFinished, Coverage, Finding, Record


def write(path: Path, records: list[Record]) -> Path:
    with Journal(path) as journal:
        for record in records:
            journal.handle(record)
    return path


def test_round_trip(tmp_path: Path) -> None:
    records = failed()
    assert read(write(tmp_path / "new" / "journal.ndjson", records)) == records


def test_a_line_is_on_disk_when_handle_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.handle(started())
    journal.handle(case(0))
    assert len(read(tmp_path / "j")) == 2
    journal.close()
    journal.close()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_journal_is_a_plain_file_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "j", [started()])
    finally:
        os.umask(before)
    assert (tmp_path / "j").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_cannot_hold(tmp_path: Path, value: float) -> None:
    violation = msgspec.structs.replace(VIOLATION, observed=value, ratio=value)
    path = write(tmp_path / "j", [started(), case(share=value), finding(violation=violation)])
    _, judged, found = read(path)
    assert isinstance(judged, CaseFinished) and judged.judgement is not None
    assert isinstance(found, Finding) and found.violation is not None
    for back in (judged.judgement.share["loss"], found.violation.observed, found.violation.ratio):
        assert back is not None
        assert back == value or (math.isnan(back) and math.isnan(value))
    assert found.violation.expected == VIOLATION.expected


def test_a_torn_last_line_is_dropped_and_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "j", held())
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    for cut in (start + 1, start + 20, len(data) - 2):
        path.write_bytes(data[:cut])
        notes: list[str] = []
        assert read(path, note=notes.append) == held()[:-1]
        assert notes == [f"{path}: line 4 is torn and was dropped"]
        assert read(path) == held()[:-1]


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "j", held())
    path.write_bytes(path.read_bytes()[:-1])
    notes: list[str] = []
    assert read(path, note=notes.append) == held()
    assert not notes


def test_a_torn_line_within_is_refused_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "j", held())
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:30]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match="line 2: not a record of a journal"):
        read(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no records"),
        (b"\n", "line 1: not a record"),
        (b"garbage\n", "line 1: not a record"),
        (b"\xff\xfe\n", "line 1: not a record"),
        (b"[" * 100_000 + b"\n", "line 1: not a record"),
        (b"[1, 2]\n", "line 1: not a record"),
        (b'{"type": "something else"}\n', "line 1: not a record"),
        (b'{"type": "run star', "line 1: not a record"),
        (b'{"type": "run started", "format": 1}\n', "format 1; this zerocheck reads format 3"),
        (encode(case()) + b"\n", "line 1: a journal starts with"),
        ((encode(started()) + b"\n") * 2, "line 2: a journal starts with"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"holds"', b'"violated"', 1), *lines[2:]], 2),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
    ],
)
def test_what_was_changed_afterwards_is_refused(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    """Changed, left out, moved, repeated: each line has a checksum of itself and those before."""
    path = tmp_path / "journal.ndjson"
    with Journal(path) as journal:
        for record in held(3):
            journal.handle(record)
    assert len(read(path, summed=True)) == len(held(3))
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UsageError, match=f"line {line}: it, or the line before it, is not as it"):
        read(path)


def test_lines_without_a_checksum_are_read_where_that_will_do(tmp_path: Path) -> None:
    path = tmp_path / "journal.ndjson"
    path.write_bytes(b"".join(encode(record) + b"\n" for record in held()))
    assert read(path) == held()
    with pytest.raises(UsageError, match="lines have no checksum"):
        read(path, summed=True)


def test_a_last_line_without_its_end_needs_a_checksum_too(tmp_path: Path) -> None:
    path = write(tmp_path / "j", held())
    path.write_bytes(path.read_bytes() + encode(case(9)))
    assert len(read(path)) == len(held()) + 1
    with pytest.raises(UsageError, match="1 line has no checksum"):
        read(path, summed=True)


def test_pairs_that_are_none_are_refused(tmp_path: Path) -> None:
    wrong = Coverage(implementation="zero2", features=("world-2",), supported="xyz")
    path = write(tmp_path / "j", [started(), wrong])
    with pytest.raises(UsageError, match="'xyz' are no pairs of features"):
        read(path)


def test_a_directory_that_is_removed_at_the_start(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "report" / "j")
    shutil.rmtree(tmp_path / "report")
    with pytest.raises(UsageError, match="was removed while the run began"):
        journal.handle(started())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        read(tmp_path / "no")


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        Journal(tmp_path / "file" / "journal.ndjson")


def test_a_new_run_starts_a_new_journal(tmp_path: Path) -> None:
    write(tmp_path / "j", failed())
    assert read(write(tmp_path / "j", held())) == held()


def test_two_runs_never_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.handle(started())
        with pytest.raises(UsageError, match="another run is writing"):
            Journal(tmp_path / "j")
        journal.handle(case())
    assert len(read(tmp_path / "j")) == 2


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hand_made import case, started\n"
        "from zerocheck.run.records.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for record in (started(), case(0), case(1)): journal.handle(record)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "j"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=False, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == -9
    assert read(path) == [started(), case(0), case(1)]
