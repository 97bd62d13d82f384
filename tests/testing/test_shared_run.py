"""One run behind many tests: two workers of one session, each with its own objects."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from hand_made import held

from zerocheck.errors import HarnessError, UsageError
from zerocheck.run.records.journal import Journal
from zerocheck.run.records.tally import Tally, tally
from zerocheck.testing.shared_run import SharedRun

SESSION = "a"


class Run(SharedRun):
    """Notes when it runs, and takes some time."""

    log: ClassVar[list[tuple[str, str]]] = []
    times: ClassVar[list[tuple[float, float]]] = []
    seconds = 0.3
    error: Exception | None = None

    def __init__(self, label: str, worker: str) -> None:
        super().__init__(label, {"implementations": ("fsdp2",), "seed": len(label)})
        self.worker = worker

    def _run(self, directory: Path) -> Tally:
        Run.log.append((self.worker, self.label))
        began = time.monotonic()
        time.sleep(self.seconds)
        Run.times.append((began, time.monotonic()))
        if self.error is not None:
            raise self.error
        with Journal(directory / "journal.ndjson") as journal:
            for record in held():
                journal.handle(record)
        return tally(held())


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "log", [])
    monkeypatch.setattr(Run, "times", [])


def workers(directory: Path, labels: str, *, session: str = SESSION) -> None:
    """Two workers that ask for all runs in the same order, as pytest-xdist's do."""

    both = threading.Barrier(2)

    def work(name: str) -> None:
        runs = [Run(label, name) for label in labels.split()]
        both.wait()
        for run in runs:
            assert run.result(directory, session, runs).cases == 2

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_run_is_run_once(tmp_path: Path) -> None:
    workers(tmp_path, "x")
    assert len(Run.log) == 1


def test_who_would_wait_begins_another_run(tmp_path: Path) -> None:
    workers(tmp_path, "x yy zzz wwww")
    assert sorted(label for _, label in Run.log) == ["wwww", "x", "yy", "zzz"]
    assert {worker for worker, _ in Run.log} == {"one", "two"}
    first, second, *_ = sorted(Run.times)
    assert second[0] < first[1]  # at the same time


def test_another_session_runs_it_again(tmp_path: Path) -> None:
    workers(tmp_path, "x")
    workers(tmp_path, "x", session="b")
    assert len(Run.log) == 2


@pytest.mark.parametrize("error", [UsageError("no such thing"), ZeroDivisionError("oh")])
def test_an_error_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Run, "error", error)
    one, two = Run("x", "one"), Run("x", "two")
    lengths: list[int] = []
    for run, kind in ((one, type(error)), (one, type(error)), (two, None)):
        kind = kind or (UsageError if isinstance(error, UsageError) else HarnessError)
        with pytest.raises(kind, match=str(error)) as caught:
            run.result(tmp_path, SESSION)
        lengths.append(len(caught.traceback))
    assert len(Run.log) == 1
    assert lengths[1] <= lengths[0] + 1  # a raise does not add to the last one's traceback


def test_a_run_that_was_killed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as within:
        within.setattr(Run, "error", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            Run("x", "one").result(tmp_path, SESSION)
    assert Run("x", "two").result(tmp_path, SESSION).cases == 2
    assert len(Run.log) == 2


def test_other_options_are_another_run() -> None:
    assert Run("x", "one").key == Run("x", "two").key != Run("xx", "one").key


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        Run("x", "one").result(tmp_path / "file", SESSION)
