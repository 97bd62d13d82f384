"""History: journals are kept once, runs of one kind are laid in a row, and changes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import KNOWN, case, finding, finished, held, started
from msgspec.structs import replace

from zerocheck.errors import UsageError
from zerocheck.report import html
from zerocheck.report.history import changes, keep, past_runs
from zerocheck.report.html.history import history_view
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import Record, RunStarted
from zerocheck.run.records.tally import tally

HOUR = 3600.0
BROKEN: list[Record] = [
    started(),
    case(0),
    finding(),
    finding(number=1, fingerprint="zero2 / crashed / RuntimeError"),
    finished(1),
]


def written(folder: Path, records: list[Record], hours: float = 0, torch: str = "") -> Path:
    """The journal of a run that began so many hours later."""
    first, *rest = records
    assert isinstance(first, RunStarted)
    environment = replace(first.environment, torch=torch or first.environment.torch)
    first = replace(first, started=first.started + hours * HOUR, environment=environment)
    path = folder / "journal.ndjson"
    path.write_bytes(b"".join(encode(one) + b"\n" for one in (first, *rest)))
    return path


def test_a_run_is_kept_once(tmp_path: Path) -> None:
    journal = written(tmp_path, held())
    kept = keep(journal, tmp_path / "past")
    assert kept.name.startswith("20231114-221320-") and keep(journal, tmp_path / "past") == kept
    assert keep(kept, tmp_path / "past") == kept  # compressed already
    assert [one.name for one in (tmp_path / "past").iterdir()] == [kept.name]


def test_runs_of_one_kind_in_their_order(tmp_path: Path) -> None:
    past, notes = tmp_path / "past", []
    known = [started(), case(0), finding(known=KNOWN), finished(0)]
    keep(written(tmp_path, BROKEN, 2), past)
    keep(written(tmp_path, held(), 1), past)
    keep(written(tmp_path, known, 3, torch="2.99.0"), past)
    keep(written(tmp_path, [started("ddp"), case(0, "ddp"), finished()], 4), past)
    (past / "0-other.ndjson.xz").write_bytes(b"no xz")
    runs = past_runs(past, tally(held()), notes.append)
    assert [len(one.findings) for one in runs] == [0, 2, 0]
    assert [len(one.faults) for one in runs] == [0, 0, 1]
    assert len(notes) == 1 and "0-other.ndjson.xz" in notes[0]
    said = [(one.when[-5:], one.what) for one in changes(runs)]
    assert said == [
        ("01:13", "torch"),
        ("01:13", "known fault showed up"),
        ("01:13", "finding gone"),
        ("00:13", "new finding"),
    ]


def test_the_page_plots_them(tmp_path: Path) -> None:
    past = tmp_path / "past"
    for hours, records in enumerate((held(3), BROKEN, held(4))):
        keep(written(tmp_path, records, hours), past)
    runs = past_runs(past, tally(held()), print)
    view = history_view(runs)
    assert view is not None and len(view.rows) == 3
    cases = view.plots[0]
    assert cases.name == "cases" and cases.last == "4" and len(cases.dots) == 3
    assert cases.dots[2] == (220.0, 0.0) and cases.dots[0][1] == 15.0  # 3 of 4, from 0 up
    text = html.render(tally(held()), runs)
    assert 'id="history"' in text and "finding gone" in text
    assert 'id="history"' not in html.render(tally(held()), runs[:1])


def test_a_history_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        keep(written(tmp_path, held()), tmp_path / "file")
