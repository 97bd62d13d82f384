from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerocheck


def test_a_bundle_is_for_its_user_alone(tmp_path: Path) -> None:
    """It can hold samples of the training."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(model, optimizer, directory=tmp_path / "out", on_violation="warn")
    with check.step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight += 1
    (bundle,) = (path.parent for path in tmp_path.rglob("bundle.json"))
    assert bundle.stat().st_mode & 0o777 == 0o700
