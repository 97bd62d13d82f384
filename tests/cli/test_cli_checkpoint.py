"""`zerocheck checkpoint`: what it shows, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from zerocheck.checkpoint.result import CheckpointReport
from zerocheck.cli import main


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model with its AdamW, as most scripts save it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    path = tmp_path / "saved.pt"
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)
    return path


def test_nothing_is_wrong(saved: Path) -> None:
    result = invoke(saved)
    assert result.exit_code == 0
    assert "Psi = 8 elements with moments" in result.output
    assert "12.00 Psi" not in result.output  # with its steps it is more
    assert "steps (parameters): 1 (2)" in result.output
    assert "param group of 2: lr 0.01, betas (0.9, 0.999)" in result.output
    assert result.output.endswith(
        "nothing wrong: files, tiling, readable, finite, nonnegative, steps, moments, bounded\n"
        "loads on any number of ranks\n"
    )
    tree = torch.load(saved)
    del tree["optim"]
    torch.save(tree, saved)
    assert "there is no state of an optimizer" in invoke(saved).output.splitlines()[-1]


def test_findings(saved: Path, tmp_path: Path) -> None:
    tree = torch.load(saved)
    tree["model"]["weight"][1, 1] = torch.inf
    torch.save(tree, tmp_path / "wrong.pt")
    result = invoke(tmp_path / "wrong.pt", "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "WRONG finite: values that are not finite\n" in result.output
    assert "  model weight: 1 of 6 elements, first [1, 1] is inf\n" in result.output
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=CheckpointReport)
    assert [one.where for one in report.findings] == ["model weight"]
    result = invoke(saved, tmp_path / "wrong.pt")
    assert result.exit_code == 1
    assert "DIFFERENT values: tensors that differ\n" in result.output


def test_equal(saved: Path) -> None:
    result = invoke(saved, saved)
    assert result.exit_code == 0
    assert "equal, bit for bit: names, shapes, values, steps, settings\n" in result.output


def test_many_findings_are_counted(tmp_path: Path) -> None:
    torch.save({f"{n}.weight": torch.tensor([torch.nan]) for n in range(8)}, tmp_path / "a.pt")
    result = invoke(tmp_path / "a.pt")
    assert "  and 3 more\n" in result.output
    assert "not checked: steps (no step counts)\n" in result.output
    assert result.output.endswith("wrong: 8 findings\n")


def test_wrong_usage(saved: Path, tmp_path: Path) -> None:
    for args, message in (
        ([tmp_path / "svaed.pt"], "did you mean 'saved.pt'?"),
        ([saved, tmp_path / "gone"], "there is no checkpoint"),
        ([saved, "--json", tmp_path / "no" / "file"], "cannot be written"),
        ([], "Missing argument 'DIR'"),
    ):
        result = invoke(*args)
        assert result.exit_code == 2, result.output
        assert message in result.output
