"""What is set before a GPU starts. No GPU is needed: the calls to the driver are stood in for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from zerocheck.errors import UsageError
from zerocheck.ranks.device import prepare

FLAGS = [
    (torch.backends.cuda.matmul, "allow_tf32", True),
    (torch.backends.cudnn, "allow_tf32", True),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", False),
]
"""Where, which, and its value when runs are not to be repeated."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """GPUs that were taken, on a host that has two."""
    before = [getattr(place, name) for place, name, _ in FLAGS]
    for place, name, value in FLAGS:
        setattr(place, name, value)
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield numbers
    for (place, name, _), value in zip(FLAGS, before, strict=True):
        setattr(place, name, value)


def test_a_gpu_is_that_of_the_local_rank_and_repeatable(taken: list[int]) -> None:
    os.environ |= {"RANK": "5", "LOCAL_RANK": "1"}
    prepare("cuda")
    assert taken == [1]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert [getattr(place, name) for place, name, _ in FLAGS] == [False, False, False, True]


def test_the_cpu_needs_nothing(taken: list[int]) -> None:
    prepare("cpu")
    assert taken == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_more_ranks_than_gpus(taken: list[int]) -> None:
    os.environ["LOCAL_RANK"] = "2"
    with pytest.raises(UsageError, match="local rank 2 has no GPU, this host has 2: start at most"):
        prepare("cuda")


def test_a_workspace_that_gives_other_bits(taken: list[int]) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    prepare("cuda")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*allowed: :4096:8"):
        prepare("cuda")
