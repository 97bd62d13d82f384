"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slices import WHOLE

collect_ignore = ["example_project"]  # it has tests of its own


def pytest_report_header() -> str:
    """Said before the tests: what is not run is no secret."""
    return "long tests: " + ("whole" if WHOLE else "a slice; tox -e conformance runs all of them")


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
