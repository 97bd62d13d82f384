"""What a GPU draws by itself is noticed, and what it repeats is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zerocheck
from zerocheck.protocol.verdicts import Judgement


class Recurrent(nn.Module):
    """cuDNN keeps the random state of its dropout between the layers by itself."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(8, 16, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cells(x)[0])
        return result


class Scattered(nn.Module):
    """Its sums have another order each time: atomics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(x).tanh()).flatten(0, 1)
        where = torch.arange(len(hidden), device=x.device) % 3
        sums = torch.zeros(3, 16, device=x.device).index_add(0, where, hidden)
        result: torch.Tensor = self.head(sums)
        return result


def last(made: Callable[[], nn.Module], folder: Path, factor: float = 1.0) -> Judgement:
    model = made().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    check = zerocheck.attach(
        model, optimizer, reference=made, every=1, directory=folder, on_violation="warn"
    )
    for _ in range(3):
        with check.step():
            optimizer.zero_grad()
            loss = model(torch.randn(64, 32, 8, device="cuda")).square().mean()
            (factor * loss).backward()
            if factor != 1:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
            optimizer.step()
    assert check.last is not None
    return check.last


def test_dropout_of_cudnn_is_not_judged(tmp_path: Path) -> None:
    found = last(lambda: Recurrent(0.5), tmp_path)
    assert not found.violations and found.statuses["update"] == "holds"
    assert "cuDNN keeps the random state" in found.unjudged["gradient"]


@pytest.mark.parametrize("made", [lambda: Recurrent(0.0), Scattered], ids=["lstm", "scattered"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_repeats_is_judged(
    made: Callable[[], nn.Module], factor: float, tmp_path: Path
) -> None:
    found = last(made, tmp_path, factor)
    assert found.statuses["gradient"] == ("holds" if factor == 1 else "violated"), found
