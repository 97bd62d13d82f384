"""Every format, from records made by hand, some of them hostile."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from hand_made import (
    HOSTILE,
    case,
    failed,
    finding,
    finished,
    held,
    hostile_finding,
    known,
    stale,
    started,
)

from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.report import json_report, junit, markdown
from zerocheck.report.markdown import escape, fenced
from zerocheck.report.write import FORMATS, write_reports
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally


def hostile() -> list[Record]:
    """Records in which a name, a reason and a finding are hostile."""
    return [
        started(HOSTILE),
        case(0, HOSTILE, "violated", gradient="violated"),
        case(1, HOSTILE, "unsupported", reason=HOSTILE),
        hostile_finding(),
        finished(1),
    ]


def test_json() -> None:
    data = json.loads(json_report.render(tally(failed())))
    assert data["format"] == 2 and data["exit_code"] == 1
    assert data["environment"]["torch"] == "2.13.0"
    assert data["run"]["cases"] == 4 and data["run"]["outcome"] == "done"
    gradient = data["implementations"]["zero2"]["obligations"]["gradient"]
    assert gradient["status"] == "violated"
    assert gradient["verdicts"]["violated"] == gradient["verdicts"]["holds"] == 1
    coverage = data["implementations"]["zero2"]["coverage"]
    assert coverage["world_sizes"] == {"2": 1, "3": 1}
    assert "world-4" in coverage["not_exercised"] and coverage["features"]["world-3"] == 1
    assert [f["implementation"] for f in data["findings"]] == ["zero2", "ddp"]
    assert data["findings"][0]["replay"].startswith("zerocheck replay ")


def test_every_format_says_what_no_case_of_an_implementation_exercises(tmp_path: Path) -> None:
    given = {"zero2": {"clip": "it clips nothing"}}
    records = [started(without_of=given), case(clip="not exercised"), finished()]
    write_reports(records, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["run"]["without_of"] == given
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "clip of zero2" in text and "not checked: it clips nothing" in text
    assert "<failure" not in (tmp_path / "junit.xml").read_text()


def test_every_format_says_what_a_case_left_behind(tmp_path: Path) -> None:
    """And what no fresh rank process showed, which fails nothing."""
    leak = "left grad mode off on rank 1"
    doubted = finding(suspicion="it shows only after case 3 (other)", confirmed=0, tries=5)
    records = [
        started(),
        msgspec.structs.replace(case(), leaks=(leak,), unreproduced=doubted.title),
        doubted,
        finished(),
    ]
    write_reports(records, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["exit_code"] == 0 and not data["findings"]
    assert data["implementations"]["zero2"]["leaks"] == {leak: 1}
    assert [one["suspicion"] for one in data["unreproduced"]] == [doubted.suspicion]
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert f"zero2 {leak} (1 case)" in text and "NOT REPRODUCED zero2" in text
    assert "<failure" not in (tmp_path / "junit.xml").read_text()


def test_json_has_no_number_that_json_cannot_hold() -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    text = json_report.render(tally([started(), case(share=math.inf)]))
    data = json.loads(text, parse_constant=refuse)
    assert data["implementations"]["zero2"]["obligations"]["loss"]["max_share"] == "inf"


def test_markdown() -> None:
    text = markdown.render(tally(failed()))
    row = re.search(r"\| zero2 +\|(.*)\|", text)
    assert row is not None and "1 violated of 2" in row.group(1)
    assert "## Findings" in text and "  replay      zerocheck replay " in text
    assert "Stacks and output of the ranks:\n\n```text\nTraceback" in text
    assert "| world-4 " in text and "- zero2: 1 finding in 2 cases: 1 violated" in text
    assert re.search(r"\| ddp +\| 1 +\| no empty parameters", text)


def test_markdown_of_a_run_that_holds() -> None:
    text = markdown.render(tally(held()))
    assert "All obligations hold. 2 cases: 2 passed." in text and "## Findings" not in text


def test_an_interrupted_run_says_so() -> None:
    counted = tally([started(planned=9), case()])
    assert "did not finish: 1 of 9 cases" in markdown.render(counted)
    assert json.loads(json_report.render(counted))["run"]["outcome"] == "interrupted"


def test_markdown_escapes() -> None:
    assert escape("a|b\n<i>_*`[x](y)") == r"a\|b &lt;i&gt;\_\*\`\[x\](y)"
    assert fenced("a ```` b").startswith("`````text\n")
    text = markdown.render(tally(hostile()))
    assert "\x1b" not in text and "\u202e" not in text
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert "<b>" not in outside
    for line in outside.splitlines():
        if line.startswith("| ") and r"\[red\]" in line and "violated" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) == len(EQUIVALENCE) + 2


def test_junit() -> None:
    root = ET.fromstring(junit.render(tally(failed())))
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"zero2", "ddp"}
    assert suites["zero2"].get("tests") == str(len(EQUIVALENCE))
    assert suites["zero2"].get("failures") == "1"
    assert suites["ddp"].get("failures") == str(len(EQUIVALENCE))
    failure = suites["zero2"].find("testcase[@name='gradient']/failure")
    assert failure is not None and failure.get("message") == "1 violated of 2"
    assert failure.text is not None and "4 times too large" in failure.text
    crash = suites["ddp"].find("testcase[@name='loss']/failure")
    assert crash is not None and crash.text is not None and "rank 0 waited" in crash.text


def test_junit_fails_what_was_not_checked() -> None:
    root = ET.fromstring(junit.render(tally([started(), case(clip="not exercised")])))
    failure = root.find("testsuite/testcase[@name='clip']/failure")
    assert failure is not None and failure.get("message") == "nothing was checked"
    assert root.find("testsuite/testcase[@name='loss']/failure") is None


def test_junit_of_hostile_text_is_xml() -> None:
    text = junit.render(tally(hostile()))
    text.encode("utf-8")
    root = ET.fromstring(text)
    failure = root.find("testsuite/testcase[@name='gradient']/failure")
    assert failure is not None and "<b>" in str(failure.text)


def test_known_issues_in_every_format() -> None:
    counted = tally(known())
    data = json.loads(json_report.render(counted))
    assert data["exit_code"] == 0 and data["findings"] == []
    assert data["implementations"]["zero2"]["cases"]["known"] == 1
    (seen,) = data["known_issues"]["seen"]
    assert seen["known"]["link"] == "https://example.org/7"
    assert data["known_issues"]["left_out"][0]["count"] == 3
    text = markdown.render(counted)
    assert (
        "No new finding. 2 cases: 1 passed, 1 with known issues. 1 known issue reproduced (silent)."
        in text
    )
    assert "## Findings" not in text and "## Known issues" in text
    assert "### KNOWN zero2: the reduced gradient" in text
    assert "- zero2: 3 cases left out: known hang zero2 / hung: ranks mix up" in text
    root = ET.fromstring(junit.render(counted))
    suite = root.find("testsuite")
    assert suite is not None
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")
    for obligation in ("gradient", "publish"):  # what is published follows from the gradient
        skipped = suite.find(f"testcase[@name='{obligation}']/skipped")
        assert skipped is not None and skipped.get("message") == "1 holds, 1 known"
        assert skipped.text is not None and "upstream divides by nothing" in skipped.text


def test_a_stale_issue_in_every_format() -> None:
    counted = tally([*held()[:-1], stale(), finished(1)])
    data = json.loads(json_report.render(counted))
    assert data["known_issues"]["stale"][0]["seen"] == "its own case holds"
    text = markdown.render(counted)
    assert "### STALE zero2: a known issue does not show any more" in text
    assert "  to do       remove known.toml, entry 2" in text
    root = ET.fromstring(junit.render(counted))
    failure = root.find("testsuite/testcase[@name='gradient']/failure")
    assert failure is not None and failure.get("message") == "a known issue is stale"
    assert root.find("testsuite/testcase[@name='loss']/failure") is None
    crash = ET.fromstring(junit.render(tally([*held()[:-1], stale(obligation=None)])))
    assert len(crash.findall("testsuite/testcase/failure")) == len(EQUIVALENCE)


def test_write_reports(tmp_path: Path) -> None:
    written = write_reports(failed(), tmp_path / "a" / "b")
    assert [path.name for path in written] == list(FORMATS)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == sorted(FORMATS)
    # A later run overwrites only what names zerocheck: see records/previous_runs.py.
    assert all(b"zerocheck" in path.read_bytes() for path in written)
    before = [path.read_bytes() for path in written]
    write_reports(failed(), tmp_path / "a" / "b")
    assert [path.read_bytes() for path in written] == before


def test_reports_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reports(held(), tmp_path)
    before = (tmp_path / "report.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_reports([*failed(), finding()], tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
