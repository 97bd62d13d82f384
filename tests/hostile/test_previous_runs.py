"""Nothing that was there before a run is lost, whether the run is refused or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slices import sliced

from zerocheck.errors import UsageError
from zerocheck.run.records.journal import Journal, read
from zerocheck.run.records.previous_runs import KEPT
from zerocheck.run.records.records import RunFinished

FAULT = "zerocheck.faults.gradient:LossTimesWorld"
REFUSED = {
    "a file that does not import": ("broken.py:build",),
    "no such implementation": ("zero9",),
    "no such ranks": ("zero2", "--world-sizes", "251"),
    "no such profile": ("zero2", "--profile", "quik"),
    "no such model": ("zero2", "--model", "broken.py:build"),
}


def zerocheck(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerocheck", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def state(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, with what is in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run that found something."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    done = zerocheck(folder, "run", FAULT, "--world-sizes", "2", "--max-cases", "1", "--no-shrink")
    assert done.returncode == 1, done.stdout + done.stderr
    return folder


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("why", sliced([*REFUSED], [*REFUSED][::4]))
def test_a_refused_run_leaves_the_earlier_one_alone(finished: Path, why: str) -> None:
    before = state(finished)
    refused = zerocheck(finished, "run", *REFUSED[why])
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert state(finished) == before


def test_an_earlier_run_is_kept_and_can_be_read(finished: Path) -> None:
    report = finished / "zerocheck-report"
    (report / "findings" / "mine.json").write_bytes(
        next((report / "findings").glob("*.json")).read_bytes()
    )
    journal = (report / "journal.ndjson").read_bytes()
    case_files = {path.name for path in (report / "findings").glob("*.json")} - {"mine.json"}
    done = zerocheck(finished, "run", "zero2", "--world-sizes", "2", "--max-cases", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = report / "earlier" / "1"
    assert (kept / "journal.ndjson").read_bytes() == journal
    assert {path.name for path in (kept / "findings").iterdir()} == case_files
    assert [path.name for path in (report / "findings").iterdir()] == ["mine.json"]
    moved = f"zerocheck-report/findings/{case_files.pop()}"
    gone = zerocheck(finished, "replay", moved)
    place = moved.replace("report/", "report/earlier/1/")
    assert f"a later run moved it: zerocheck replay {place}" in gone.stderr
    again = zerocheck(finished, "report", "zerocheck-report/earlier/1", "--report-dir", "again")
    assert again.returncode == 1, again.stdout + again.stderr


ENDED = RunFinished(outcome="done", exit_code=0, seconds=1.0)


def test_the_last_runs_are_kept(tmp_path: Path) -> None:
    """The oldest goes with what it wrote, and not with what a user put beside it."""
    journal = tmp_path / "journal.ndjson"
    start = b'{"type":"run started"}\n'
    for number in range(KEPT + 3):
        with Journal(journal) as written:
            written.handle(ENDED)
        journal.write_bytes(start)
        if number == 1:
            (tmp_path / "earlier" / "1" / "mine.txt").write_text("mine")
    kept = sorted(path.name for path in (tmp_path / "earlier").iterdir())
    assert kept == ["1", *(str(number) for number in range(3, KEPT + 3))]
    assert [path.name for path in (tmp_path / "earlier" / "1").iterdir()] == ["mine.txt"]


TAKEN = {
    "a file of the user's": lambda path: path.write_text("my notes\n"),
    "json of the user's": lambda path: path.write_text('{"type": "note"}\n'),
    "a symbolic link": lambda path: path.symlink_to(path.with_name("target")),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a directory": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_no_journal_keeps_its_name(tmp_path: Path, what: str) -> None:
    (tmp_path / "target").write_text("precious")
    journal = tmp_path / "journal.ndjson"
    TAKEN[what](journal)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match=r"journal\.ndjson.*--report-dir"):
        Journal(journal)
    assert (tmp_path / "target").read_text() == "precious"
    assert set(os.listdir(tmp_path)) - {"journal.ndjson.new"} == set(before)


@pytest.mark.parametrize("name", ["report.md", "report.html", "junit.xml", "faults.md"])
def test_a_report_does_not_take_the_place_of_a_file_of_the_user(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("my notes\n")
    done = zerocheck(tmp_path, "run", "zero2", "--max-cases", "1", "--report-dir", ".")
    assert done.returncode == 2 and f"{name} was not written by zerocheck" in done.stderr
    assert state(tmp_path) == {name: b"my notes\n"}


def test_two_runs_never_share_a_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal.ndjson"
    with Journal(journal), pytest.raises(UsageError, match="another run"):
        Journal(journal)
    with Journal(journal) as first:
        first.handle(ENDED)
        with pytest.raises(UsageError, match="another run"):
            Journal(journal)


def test_a_run_that_never_began_leaves_no_file(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.ndjson").close()
    assert not list(tmp_path.iterdir())


def test_a_killed_run_can_be_read(finished: Path) -> None:
    """The journal has its name from the first record on."""
    assert read(finished / "zerocheck-report" / "journal.ndjson")
