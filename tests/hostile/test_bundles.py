"""Bundles of attach from elsewhere: judged again, or refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hostile.trials import damaged, mutated, trial
from slices import sliced
from torch import nn

import zerocheck

TRIALS = 40
PARTS = ("bundle.json", "rank-0.json", "rank-0.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a step that is violated."""
    directory = tmp_path_factory.mktemp("bundles")
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    check = zerocheck.attach(model, optimizer, directory=directory, on_violation="warn")
    with check.step():
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight[1, 4] += 1.0
    (bundle,) = directory.iterdir()
    return bundle


@pytest.mark.parametrize("part", PARTS)
def test_damaged(whole: Path, tmp_path: Path, part: str) -> None:
    """Bits flipped, bytes cut, doubled, zeroed or replaced."""
    path = shutil.copytree(whole, tmp_path / "bundle") / part
    data = path.read_bytes()
    for number in range(sliced(TRIALS, 12) // 4):
        path.write_bytes(damaged(data, f"bundle {part} {number}"))
        trial("replay", path.parent)


@pytest.mark.parametrize("part", PARTS[:2])
def test_mutated(whole: Path, tmp_path: Path, part: str) -> None:
    """Values of other types, extremes and hostile text in the place of others."""
    path = shutil.copytree(whole, tmp_path / "bundle") / part
    data = path.read_bytes()
    for number in range(sliced(TRIALS, 12) // 4):
        tree = mutated(msgspec.json.decode(data), f"bundle {part} {number}")
        try:
            path.write_bytes(msgspec.json.encode(tree))
        except OverflowError:  # msgspec writes no such number, so no file has it
            continue
        trial("replay", path.parent)


def test_the_whole_one_is_judged_again(whole: Path) -> None:
    assert trial("replay", whole).exit_code == 1
