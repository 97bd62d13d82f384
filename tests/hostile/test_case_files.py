"""Case files from elsewhere: a case that can be run, or a refusal in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hostile.trials import assert_lines, damaged, mutated
from slices import sliced

from zerocheck.case.schema import Block, Case, Model
from zerocheck.case.validity import check
from zerocheck.errors import UsageError
from zerocheck.run.execute.environment import environment
from zerocheck.run.findings.case_file import read, write
from zerocheck.run.records.records import CaseFile

TRIALS = 120


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A case file as a finding leaves it."""
    file = CaseFile(
        implementation="zero2",
        case=Case(mesh=(2,), model=Model(blocks=(Block(kind="mlp"), Block(kind="attention")))),
        status="violated",
        judgement=None,
        environment=environment(),
        title="the gradient is W times too large",
    )
    return write(tmp_path, "whole", file)


def refused_or_valid(path: Path) -> bool:
    """Whether it is refused, in printable words; else its case can be run."""
    try:
        file = read(path)
    except UsageError:
        return True
    check(file.case)
    return False


def test_mutated(whole: Path) -> None:
    """Values of other types, extremes and hostile text in the place of others."""
    path, refused = whole.with_name("mutated.json"), 0
    for number in range(sliced(TRIALS, 60) // 2):
        tree = mutated(msgspec.json.decode(whole.read_bytes()), f"case {number}")
        path.write_bytes(msgspec.json.encode(_within_json(tree)))
        refused += refused_or_valid(path)
    assert refused


def test_damaged(whole: Path) -> None:
    """Bits flipped, bytes cut, doubled, zeroed or replaced."""
    path, refused = whole.with_name("damaged.json"), 0
    for number in range(sliced(TRIALS, 60) // 2):
        path.write_bytes(damaged(whole.read_bytes(), f"case {number}"))
        refused += refused_or_valid(path)
    assert refused


def test_the_whole_one_is_read(whole: Path) -> None:
    assert not refused_or_valid(whole)
    assert_lines(read(whole).title)


def _within_json(tree: object) -> object:
    """Without numbers that msgspec does not write."""
    if isinstance(tree, dict):
        return {key: _within_json(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_within_json(value) for value in tree]
    return 2**63 if isinstance(tree, int) and abs(tree) > 2**64 else tree
