"""Slices are judged in threads, with the verdict that one after the other gives."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from three_steps import trained
from torch import nn

from zerocheck.attached.checks import rank_checks, slices, workers
from zerocheck.attached.checks.rank_checks import _JudgedSlice
from zerocheck.protocol.verdicts import Judgement


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, and slices of 16 elements."""
    monkeypatch.setattr(workers, "processors", lambda: 4)
    monkeypatch.setattr(slices, "AT_ONCE", 16)


def test_results_come_in_order(four: None) -> None:
    barrier = threading.Barrier(4, timeout=20)  # all four run at once

    def work(number: int) -> tuple[int, str]:
        barrier.wait()
        return number, threading.current_thread().name

    found = list(workers.in_threads(work, range(8)))
    assert [number for number, _ in found] == [*range(8)]
    assert len({name for _, name in found}) == 4


@pytest.mark.parametrize(
    ("ranks", "local", "cores", "expected"),
    [
        (1, "", 4, 4),
        (8, "", 4, 1),  # on one host, as far as is known
        (16, "8", 96, 12),
        (2, "8", 4, 2),
        (8, "0", 64, 8),
        (1, "one", 64, 16),
    ],
)
def test_ranks_share_the_cores(
    ranks: int, local: str, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "processors", lambda: cores)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert workers.workers() == expected


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def verdict(where: Path, factor: float = 1.0) -> Judgement:
    made = model()

    def loss(made: nn.Module) -> torch.Tensor:
        result: torch.Tensor = made(torch.randn(7, 5)).square().mean()
        return result

    def after(made: nn.Module) -> None:
        for parameter in made.parameters():
            parameter.mul_(factor)

    return trained(made, loss, model, where, after=after)


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_the_verdict_is_that_of_one_thread(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(workers, "processors", lambda cores=cores: cores)
        monkeypatch.setattr(slices, "AT_ONCE", 16)
        found.append(verdict(tmp_path / str(cores), factor))
    assert found[0] == found[1]
    assert found[0].statuses["update"] == ("holds" if factor == 1.0 else "violated")
    assert len(found[0].violations[0].tensors if found[0].violations else range(4)) == 4


def test_a_reading_that_fails_is_out_for_all_slices_behind_it(
    four: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice is judged with what the one before it left, in threads too."""
    asked: list[tuple[int, tuple[str, ...]]] = []
    lock = threading.Lock()

    def of_slice(context: Any, recipe: Any, readings: Any, part: Any) -> _JudgedSlice:
        number = [one.runs for one in context.slices(range(4))].index(part.runs)
        ((rule, left),) = readings.items()
        with lock:
            asked.append((number, tuple(left)))
        return _JudgedSlice(0.0, None, {rule: left[1:] if number in (3, 6) else left})

    monkeypatch.setattr(rank_checks, "_of_slice", of_slice)
    assert verdict(tmp_path).statuses["update"] == "holds"
    first = asked[0][1]
    assert len(first) > 2
    last = {number: left for number, left in asked}
    assert {number: len(first) - len(left) for number, left in last.items()} == {
        number: (number > 3) + (number > 6) for number in last
    }
    assert max(last) > 6
