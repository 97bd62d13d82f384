"""For all tests here: they need a CUDA device, and use one."""

from __future__ import annotations

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
