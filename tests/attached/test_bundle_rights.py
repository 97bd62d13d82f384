"""Folders of bundles: who may read them, and what they may be called."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import zerocheck


def test_a_bundle_is_for_its_user_alone(tmp_path: Path) -> None:
    """It can hold samples of the training."""
    assert written(tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"out\xff")
    assert written(folder) == folder / "step-1"


def written(folder: Path) -> Path:
    """The bundle of a wrong step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(model, optimizer, directory=folder, on_violation="warn")
    with check.step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight += 1
    (bundle,) = (path.parent for path in folder.rglob("bundle.json"))
    return bundle
