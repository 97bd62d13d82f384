"""Annotations and the summary for GitHub Actions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hand_made import HOSTILE, case, failed, finding, finished, held, known, stale, started

from zerocheck.report import github, markdown
from zerocheck.run.records.tally import tally

# What the runner reads: name, properties, message. A comma or colon in a value would end it.
COMMAND = re.compile(r"::(\w+) ((?:\w+=[^,:]*)(?:,\w+=[^,:]*)*)::(.*)")


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A command as the runner reads it, its escapes undone."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    name, properties, message = found.groups()
    pairs = (pair.split("=", 1) for pair in properties.split(","))
    return name, {key: _undone(value) for key, value in pairs}, _undone(message)


def _undone(text: str) -> str:
    for escape, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(escape, character)
    return text.replace("%25", "%")


def test_an_error_for_each_finding() -> None:
    violated, crashed = map(parsed, github.commands(tally(failed())))
    assert violated[0] == crashed[0] == "error"
    title = "VIOLATED zero2: the reduced gradient is 4 times too large"
    assert violated[1] == {"title": title}  # built in: no file of the user
    assert "\n  replay      zerocheck replay " in violated[2] and title not in violated[2]
    assert crashed[1]["title"] == "CRASHED ddp: the ranks crashed: IndexError"


def test_other_reasons_to_fail() -> None:
    assert github.commands(tally(held())) == []
    reasons = github.commands(tally([started(), case(clip="not exercised"), finished(1)]))
    assert ["nothing was checked for clip" in parsed(line)[2] for line in reasons] == [True]
    (line,) = github.commands(tally([*held()[:-1], stale()]))[:1]
    assert parsed(line)[1]["title"].startswith("STALE zero2")
    cut = [parsed(line) for line in github.commands(tally(held()[:-1]))]
    assert [(kind, message) for kind, _, message in cut] == [
        ("warning", "interrupted after 2 of 2 cases")
    ]
    (line,) = github.commands(tally(known()))
    assert parsed(line)[0] == "notice"


def test_nothing_in_a_value_ends_it() -> None:
    nasty = "50%,\n::error::x:y %0A"
    given = finding(title=nasty, reason=nasty, implementation=HOSTILE)
    records = [started(HOSTILE), given, finished(1)]
    for line in github.commands(tally(records)):
        assert "\n" not in line and "\r" not in line and line.isprintable()
        _, properties, message = parsed(line)
        assert "50%, : :error::x:y %0A" in properties["title"]
        assert ": :error::x:y %0A" in message and "50%," in message


CODE = "import nowhere_to_be_found\n\n\ndef build(model):\n    pass\n\n\nclass Mine:\n    pass\n"


def test_where_an_implementation_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repository" / "here" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('it must not be imported')")
    (package / "sharding.py").write_text(CODE)
    (tmp_path / "elsewhere.py").write_text(CODE)
    monkeypatch.chdir(package.parent)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repository"))
    file = "here/mine/sharding.py"
    assert github.where("mine/sharding.py:Mine") == (file, 8)
    assert github.where("mine.sharding:build") == (file, 4)
    assert github.where("mine.sharding:build+gather-stale") == (file, 4)
    assert github.where("mine.sharding:made_by_a_call") == (file, 1)
    outside = f"{tmp_path}/elsewhere.py:Mine"
    for other in ("fsdp2", "mine.shard:X", "no.module:X", outside, "zerocheck.faults.article:X"):
        assert github.where(other) == ("", 0)


def test_the_summary_is_added_to_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    notes: list[str] = []
    github.publish(tally(failed()), notes.append)
    assert path.read_text() == "before\n" + markdown.render(tally(failed()))
    assert notes == github.commands(tally(failed()))


def test_the_summary_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    text = "# Title\n\n```text\n" + "a line with ümläuts\n" * 40_000 + "```\n"
    github.summarize(text)
    github.summarize(text)
    github.summarize(text)
    assert github.SUMMARY_BYTES - 100 < path.stat().st_size <= github.SUMMARY_BYTES == 1 << 20
    # A second step's worth does not fit: its code block is closed, and the reader is told.
    found = path.read_text(encoding="utf-8")
    assert found.count("```") % 2 == 0 and "GitHub takes 1 MiB" in found
    assert github.fitting("short", 5) == b"short"


def test_a_summary_that_cannot_be_written_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    notes: list[str] = []
    github.publish(tally(held()), notes.append)
    (line,) = notes
    assert parsed(line)[0] == "warning" and "Is a directory" in parsed(line)[2]


def test_without_a_summary_file_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    github.summarize("x")
