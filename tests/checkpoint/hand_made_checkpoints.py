"""Checkpoints for the tests, written by torch in this process, and ways to damage them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from zerocheck.checkpoint.result import CheckpointReport

STEPS = 3
WEIGHT, BIAS = "0.weight", "0.bias"


def network() -> torch.nn.Sequential:
    """Small and uneven: 7, 5 and 2 rows, buffers, and a frozen layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Linear(7, 5),
        torch.nn.Linear(5, 2),
        torch.nn.Linear(2, 2),
    )
    model[4].requires_grad_(False)
    return model


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups, the weights with amsgrad; the frozen parameters are in none."""
    weights = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    biases = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": 0.1, "amsgrad": True},
        {"params": biases, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    """Take steps on random samples, the same ones each time."""
    for step in range(steps):
        torch.manual_seed(step + 1)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state() -> dict[str, Any]:
    """A full state dict by names, as the distributed state-dict API gives it."""
    model = network()
    optimizer = adamw(model)
    train(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return copy.deepcopy({"model": of_model, "optim": of_optimizer})


def plain() -> dict[str, Any]:
    """The same training, as most scripts save it: the optimizer's parameters have numbers."""
    model = network()
    del model[4]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}


def save_dcp(tree: dict[str, Any], directory: Path) -> Path:
    """Write it as torch.distributed.checkpoint does, in one process."""
    dcp.save(tree, checkpoint_id=directory, no_dist=True)
    return directory


def edit_index(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the index of a directory of torch.distributed.checkpoint."""
    path = directory / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(bytes(data))


def found(report: CheckpointReport) -> set[tuple[str, str]]:
    """The check and the place of every finding."""
    return {(one.check, one.where) for one in report.findings}


def detail(report: CheckpointReport, check: str, where: str) -> str:
    """What is said of one place."""
    (text,) = {one.detail for one in report.findings if (one.check, one.where) == (check, where)}
    return text
