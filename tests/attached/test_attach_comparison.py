"""`zerocheck compare`: the same step in two jobs, round-off or a bug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import Ask
from click.testing import CliRunner, Result

from zerocheck.cli import main

MODEL = f"{Path(__file__).parent / 'scenarios.py'}:net"


@pytest.fixture
def step(ask: Ask, tmp_path: Path) -> Any:
    """A function that takes the step in a job, and returns its bundle."""

    def take(name: str, ranks: int, wrap: str, number: int = 1, **given: Any) -> str:
        directory = tmp_path / name
        ask("compared", ranks, wrap=wrap, directory=str(directory), **given)
        return str(directory / "recorder" / f"step-{number}")

    return take


def compared(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("wrap", "ranks"), [("ddp", 3), ("hybrid_fsdp2", 4), ("fsdp1", 2), ("plain", 1)]
)
def test_right_jobs_differ_by_round_off(step: Any, wrap: str, ranks: int) -> None:
    one, other = step("one", 2, "fsdp2"), step("other", ranks, wrap)
    done = compared(one, other, "--model", MODEL)
    assert done.exit_code == 0, done.output
    assert "both begin with the same state: 6 tensors, bit for bit" in done.output
    assert "round-off: both steps are right, and differ by up to " in done.output
    alone = compared(one, other)
    assert alone.exit_code == 0 and "are not judged: it needs --model" in alone.output


def test_a_bug_in_one_of_them(step: Any) -> None:
    one, other = step("one", 2, "fsdp2"), step("other", 3, "ddp", fault="doubled")
    done = compared(one, other, "--model", MODEL)
    assert done.exit_code == 1
    assert "   VIOLATED gradient: gradient is 2 times too large" in done.output, done.output
    assert "a bug: the step of B is wrong" in done.output
    other = step("third", 3, "ddp", fault="decayed")
    done = compared(other, one)
    assert done.exit_code == 1 and "a bug: the step of A is wrong" in done.output


def test_another_change_of_gradients(step: Any) -> None:
    """Each is right for its author, and the two jobs do not do the same."""
    one, other = step("one", 2, "fsdp2"), step("other", 3, "ddp", fault="scaled")
    done = compared(one, other, "--model", MODEL)
    assert done.exit_code == 1
    assert "in B it multiplies every gradient by 0.7" in done.output, done.output
    assert "not the same step" in done.output


def test_other_samples(step: Any) -> None:
    one, other = step("one", 2, "fsdp2"), step("other", 3, "ddp", seed=6)
    done = compared(one, other, "--model", MODEL)
    assert done.exit_code == 1
    assert "the samples or the losses are not the same: local gradients of 0.weight" in done.output
    assert "not the same step" in done.output


def test_other_options(step: Any) -> None:
    one, other = step("one", 2, "fsdp2"), step("other", 2, "ddp", lr=2e-2)
    done = compared(one, other)
    assert done.exit_code == 1
    assert "lr of 0.weight and 5 more is 0.01 in A and 0.02 in B" in done.output


def test_what_is_refused(step: Any, tmp_path: Path) -> None:
    one, other = step("one", 2, "fsdp2"), step("other", 3, "ddp", number=2)
    done = compared(one, other)
    assert done.exit_code == 2
    assert "do not begin with the same state: parameter of 0.weight and" in done.output
    assert "load both jobs from one checkpoint" in done.output
    done = compared(one, str(tmp_path))
    assert done.exit_code == 2 and "is no bundle of zerocheck.attach" in done.output
