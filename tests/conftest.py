"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slices import WHOLE

collect_ignore = ["example_project"]  # it has tests of its own

GPU_TESTS = Path(__file__).parent / "gpu"


def has_gpu() -> bool:
    """Whether there is a CUDA device. torch is asked only where there is a driver."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return False
    import torch

    return torch.cuda.is_available()


def gpu_line() -> str:
    """What of tests/gpu is run here."""
    count = sum(file.read_text().count("\ndef test_") for file in GPU_TESTS.glob("test_*.py"))
    if has_gpu():
        return f"GPU tests: {count} functions (pytest -m gpu)"
    return f"GPU tests: none of {count} functions run, no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are deselected, which the header says."""
    if has_gpu():
        return
    out = [item for item in items if item.get_closest_marker("gpu")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_report_header() -> list[str]:
    """Said before the tests: what is not run is no secret."""
    long = "long tests: " + ("whole" if WHOLE else "a slice; tox -e conformance runs all of them")
    return [long, gpu_line()]


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """One thread, as ranks have: the thread count decides bits. What a test changes is undone."""
    import torch

    torch.set_num_threads(1)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
