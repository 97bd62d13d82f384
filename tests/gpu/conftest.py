"""For all tests here: they need a CUDA device, and use one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerocheck.ranks.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on one GPU: alone with nccl, several with gloo."""
    from zerocheck.run.execute.launch import start_ranks

    with start_ranks("cuda:0") as running:
        yield running


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """torchrun of a script of this folder, in an empty folder."""
    here = Path(__file__).parent
    path = [str(here.parent / "field"), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(script: str, ranks: int, *given: object) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.run(
            [*start, "--nproc-per-node", str(ranks), str(here / script), *map(str, given)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
        )

    return run


@pytest.fixture
def zerocheck(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, in an empty folder."""

    def run(*args: object, launcher: int = 0) -> subprocess.CompletedProcess[str]:
        """launcher: ranks that torchrun starts, 0 for none."""
        start = [sys.executable, "-m"]
        if launcher:
            start += ["torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(launcher), "-m"]
        command = [*start, "zerocheck", *map(str, args)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)

    return run
