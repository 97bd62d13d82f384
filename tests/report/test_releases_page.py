"""Page of several runs, each with another release."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec
import pytest
from hand_made import ENVIRONMENT, KNOWN, case, finding, finished, started

from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import Obligation
from zerocheck.report.releases import page
from zerocheck.run.records.journal import encode, read
from zerocheck.run.records.records import Finding, Record, StaleIssue


def run(version: str, *records: Record, libraries: str = "") -> list[Record]:
    """A run of two implementations on a release of torch."""
    environment = msgspec.structs.replace(ENVIRONMENT, torch=version, libraries=libraries)
    names = ("deepspeed1",) if libraries else ("zero2", "fsdp2")
    cases = [case(number, name, mesh=(number + 1,)) for name in names for number in range(5)]
    return [started(*names, planned=10, environment=environment), *cases, *records, finished()]


def shown(implementation: str = "zero2", obligation: Obligation | None = "gradient") -> Finding:
    return finding(implementation=implementation, obligation=obligation, known=KNOWN)


def stale(implementation: str = "zero2", obligation: Obligation | None = "gradient") -> StaleIssue:
    return StaleIssue(
        implementation=implementation, known=KNOWN, seen="", advice="", obligation=obligation
    )


def rows(text: str, start: str) -> list[list[str]]:
    """Cells of the rows of tables that start with a text."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_fault_has_a_cell_for_each_release() -> None:
    text = page(
        [
            run("2.11.0"),
            run("2.12.1+cpu", stale()),
            run("2.13.0", shown()),
            run("2.14.1", shown("fsdp2"), stale("zero2")),
            run("2.15.0", stale("fsdp2"), stale("zero2")),
        ]
    )
    ((_, where, *cells, _),) = rows(text, "upstream divides")
    assert where == "fsdp2, zero2"
    assert cells == ["–", "no", "yes", "partly", "no"]
    assert "### Silent: wrong numbers" in text and "### Crash" not in text
    changes = text.partition("## What changed")[2].strip().splitlines()
    assert [line.partition(": **")[2].partition("**")[0] for line in changes] == [
        "new", "was yes, is partly", "was partly, is no",
    ]  # fmt: skip
    assert changes[0].startswith("- torch 2.13.0, after torch 2.12.1")


@pytest.mark.parametrize(
    ("obligation", "title"),
    [
        ("update", "Silent: wrong numbers"),
        ("continuation", "Silent: wrong after a load"),
        (None, "Crash, hang or refusal"),
        ("persistent", "Memory and communication"),
    ],
)
def test_faults_stand_by_severity(obligation: Obligation | None, title: str) -> None:
    text = page([run("2.13.0", shown(obligation=obligation)), run("2.14.1")])
    assert f"### {title}" in text and text.count("###") == 1


def test_a_refused_load_is_no_silent_fault() -> None:
    known = msgspec.structs.replace(KNOWN, fingerprint="zero2 / roundtrip / checkpoint / refused")
    text = page([run("2.13.0", finding(obligation="roundtrip", known=known)), run("2.14.1")])
    assert "### Crash, hang or refusal" in text


def test_verdicts_of_each_implementation() -> None:
    failed = case(7, "zero2", "violated", gradient="violated")
    text = page([run("2.13.0"), run("2.14.1", failed, finding())])
    verdicts = rows(text, "zero2 ")[0]
    assert verdicts == ["zero2", "5 hold", "5 hold, **1 fail**"]
    ((fingerprint, *cells, title),) = rows(text, "zero2 /")
    assert fingerprint == "zero2 / gradient / x W" and cells == ["–", "1"]
    assert title == "the reduced gradient is 4 times too large"


def test_the_library_names_the_column() -> None:
    text = page([run("2.13.0"), run("2.13.0", libraries="deepspeed 0.19.8"), run("2.13.0")])
    head = text.partition("## Implementations")[2].strip().splitlines()[0]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names == ["implementation", "torch 2.13.0", "deepspeed 0.19.8", "torch 2.13.0 (3)"]
    assert rows(text, "deepspeed1") == [["deepspeed1", "–", "5 hold", "–"]]


def test_a_run_without_its_end_says_so() -> None:
    assert "did not finish" in page([run("2.13.0")[:-1], run("2.14.1")])


def test_a_compressed_journal_is_read(tmp_path: Path) -> None:
    data = b"".join(encode(record) + b"\n" for record in run("2.13.0"))
    path = tmp_path / "seed-0.ndjson.xz"
    path.write_bytes(lzma.compress(data))
    assert read(path) == run("2.13.0")
    for damaged in (path.read_bytes()[:-9], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="no whole xz file"):
            read(path)
