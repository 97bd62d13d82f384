"""What holds for every test."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from slices import WHOLE

if TYPE_CHECKING:
    from zerocheck.ranks.pool import Pool

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: no collection of garbage needs to go through it, now or later.

    That takes a fifth of a second, for each simulation and for each fork of ranks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="session")
def session_pool() -> Iterator[Pool]:
    """Rank processes for the cases of all files, with `borrowed`. Sharders and faults are imported
    before they are forked."""
    from zerocheck.catalogue import BUILT_IN, INJECTED
    from zerocheck.faults.catalogue import FAULTS
    from zerocheck.ranks.pool import Pool
    from zerocheck.run.trial import TARGET

    planted = (fault.where for fault in FAULTS.values() if ":" in fault.where)
    places = (*BUILT_IN.values(), *INJECTED.values(), *planted)
    with Pool(TARGET, warm=sorted({place.partition(":")[0] for place in places})) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def deepspeed_pool() -> Iterator[Pool]:
    """The same, with DeepSpeed imported before they are forked."""
    from zerocheck.catalogue import OF_EXTRAS, modules_of
    from zerocheck.ranks.pool import Pool
    from zerocheck.run.trial import TARGET

    with Pool(TARGET, warm=modules_of(OF_EXTRAS)) as ranks:
        yield ranks
