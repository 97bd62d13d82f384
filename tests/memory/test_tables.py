"""What is published in reports/memory is what the tool says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slices import sliced

from zerocheck.catalogue import BUILT_IN
from zerocheck.memory import tables

PUBLISHED = Path(__file__).parents[2] / "reports" / "memory" / "tables.md"


def rows(text: str) -> list[list[str]]:
    """The cells of Markdown rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_what_the_formulas_give() -> None:
    text = PUBLISHED.read_text(encoding="utf-8")
    assert tables.paper_table() in text and tables.fp32_table() in text
    assert "1120 GB" in text
    assert "43.75%, 65.6% and 87.5%" in text and "limits for N to infinity" in text


def test_the_words_are_those_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the tables that take a simulation, which the tests below are about."""
    for name in ("simulated_fp32", "simulated_shards", "measured_table"):
        monkeypatch.setattr(tables, name, lambda *_: "| simulated |")
    made = tables.render_tables().splitlines()
    published = PUBLISHED.read_text(encoding="utf-8").splitlines()
    assert [line for line in made if not line.startswith("|")] == [
        line for line in published if not line.startswith("|")
    ]


def test_the_7b_row_of_every_stage() -> None:
    assert [row[:3] for row in rows(tables.fp32_table())[2:]] == [
        ["0", "112", "0.00%"],
        ["1", "63", "43.75%"],
        ["2", "38.5", "65.62%"],
        ["3", "14", "87.50%"],
    ]


@pytest.mark.long
def test_simulated_and_measured() -> None:
    made = rows(
        tables.measured_table(sliced(tuple(BUILT_IN), ("zero-redundancy", "fsdp2", "zero2")))
    )
    published = rows(PUBLISHED.read_text(encoding="utf-8"))
    assert len(made) == 2 + sliced(len(BUILT_IN), 3)
    for row in made[2:]:
        *_, simulated, measured = row
        assert simulated == measured and row in published


@pytest.mark.long
def test_a_simulated_row() -> None:
    model, ranks = sliced(("zero-7.5b", 1024), ("llama-70b", 64))
    again = rows(tables.simulated_shards(model, (ranks,)))[2]
    assert again in rows(PUBLISHED.read_text(encoding="utf-8"))


def test_simulated_is_never_less_than_the_formula() -> None:
    compared = [
        row
        for row in rows(PUBLISHED.read_text(encoding="utf-8"))
        if len(row) == len(tables.HEADERS) and row[1].isdigit()
    ]
    assert len(compared) == 13
    for row in compared:
        assert 0 <= int(row[4].replace(",", "")) < int(row[2].replace(",", "")) / 1000


@pytest.mark.long
def test_a_measurement_prints_nothing_on_its_own(tmp_path: Path) -> None:
    """In a process of its own: torch's profiler reads its level of logs once."""
    code = (
        "from zerocheck.memory.setup import Setup\n"
        "from zerocheck.memory.source import source\n"
        "from zerocheck.memory.tables import measure\n"
        "given = Setup(model='small_models:small', implementation='ddp', sequence=5)\n"
        "measure(given, source(given.model))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "profiler" not in done.stderr
