"""`zerocheck faults` on the command line: what it starts, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hand_made_faults import DONE, started, tried

from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.faults.registry import FAULTS, OF_EXTRAS
from zerocheck.kill_matrix.options import MatrixOptions
from zerocheck.run.execute import launch
from zerocheck.run.records.matrix_records import MatrixRecord


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def with_engine(
    monkeypatch: pytest.MonkeyPatch,
    records: Sequence[MatrixRecord],
    code: int = 0,
    then: BaseException | None = None,
) -> list[MatrixOptions]:
    """Replace the engine by one that gives these records; returns what it is called with."""
    asked: list[MatrixOptions] = []

    def run(options: MatrixOptions, handlers: Sequence[Any], *, ranks: object) -> int:
        asked.append(options)
        for record in records:
            for handler in handlers:
                handler.handle(record)
        if then is not None:
            raise then
        return code

    monkeypatch.setattr("zerocheck.kill_matrix.engine.run", run)
    monkeypatch.setattr(launch, "start_ranks", lambda *_, **__: nullcontext())
    return asked


def test_the_list_has_all_of_them() -> None:
    result = invoke("faults", "--list")
    assert result.exit_code == 0
    for fault in FAULTS.values():
        assert f"  {fault.name} " in result.stdout
        assert fault.summary in result.stdout and fault.source in result.stdout


def test_faults_of_an_extra_are_listed_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zerocheck.catalogue.find_spec", lambda _: object())
    there = invoke("faults", "--list").stdout
    assert "faults in deepspeed, which run where they are named\n" in there
    assert all(f"  {name} " in there for name in OF_EXTRAS)
    monkeypatch.setattr("zerocheck.catalogue.find_spec", lambda _: None)
    without = invoke("faults", "--list").stdout
    assert not any(f"  {name} " in without for name in OF_EXTRAS)
    assert "named: none here, since it is not installed; install it with: pip install" in without
    named = invoke("faults", "engine-gathers-stale")
    assert named.exit_code == 2
    assert "engine-gathers-stale needs deepspeed, which is not installed" in named.stderr


def test_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_engine(monkeypatch, [started("decay-twice"), tried("decay-twice"), DONE])
    result = invoke(
        *("faults", "decay-twice", "gather-stale", "--profile", "thorough", "--seed", "7"),
        *("--world-sizes", "3,2", "--max-cases", "5", "--obligations", "update,loss"),
        *("--report-dir", "out"),
    )
    assert result.exit_code == 0, result.output
    assert asked == [
        MatrixOptions(
            names=("decay-twice", "gather-stale"),
            profile="thorough",
            seed=7,
            world_sizes=(3, 2),
            max_cases=5,
            obligations=("update", "loss"),
            report_dir=Path("out"),
        )
    ]


@pytest.mark.parametrize(("caught_by", "code"), [("gradient", 0), ("", 1)])
def test_it_writes_its_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caught_by: str, code: int
) -> None:
    with_engine(monkeypatch, [started("a"), tried("a", caught_by=caught_by), DONE], code)
    result = invoke("faults")
    assert result.exit_code == code
    folder = tmp_path / "zerocheck-report"
    names = {"faults.ndjson", "faults.json", "faults.md"}
    assert {path.name for path in folder.iterdir()} == names
    assert "report: zerocheck-report/faults.md" in result.stdout
    again = invoke("report", "zerocheck-report/faults.ndjson", "--report-dir", "again")
    assert again.exit_code == code
    for name in ("faults.json", "faults.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_ctrl_c_leaves_the_rows_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_engine(monkeypatch, [started("a", "b"), tried("a")], then=KeyboardInterrupt())
    result = invoke("faults")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    text = (tmp_path / "zerocheck-report" / "faults.md").read_text(encoding="utf-8")
    assert "not complete: 1 of 2 faults" in text
    assert invoke("report", "zerocheck-report/faults.ndjson").exit_code == 130


def test_a_refusal_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_engine(monkeypatch, [], then=UsageError("a.py does not import"))
    result = invoke("faults")
    assert result.exit_code == 2 and result.stderr == "error: a.py does not import\n"
    assert not list((tmp_path / "zerocheck-report").iterdir())


def test_a_torn_line_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_engine(monkeypatch, [started("a", "b"), tried("a"), tried("b"), DONE])
    invoke("faults")
    journal = tmp_path / "zerocheck-report" / "faults.ndjson"
    journal.write_bytes(journal.read_bytes()[:-5])
    result = invoke("report", str(journal))
    assert result.exit_code == 130 and "line 4 is torn" in result.stderr


def test_under_torchrun_it_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(
        UsageError, match=r"start it without torchrun; one fault runs .* by its name"
    ):
        MatrixOptions()
