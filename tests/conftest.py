"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from slices import WHOLE, thinned

if TYPE_CHECKING:
    from zerocheck.ranks.pool import Pool

collect_ignore = ["example_project"]  # it has tests of its own

# A test that hangs fails, with its stacks: pytest-timeout reads this, and the longest test takes a
# quarter of it. Not faulthandler_timeout: its thread is missing in a fork, which would wait for it.
os.environ.setdefault("PYTEST_TIMEOUT", "600")

# Ignored in what a shell starts in the background, or nohup; runs that tests end would inherit it.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# An example's time says what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

GPU_TESTS = Path(__file__).parent / "gpu"
LONG_FILES = (
    "faults/test_faults.py", "ranks/test_two_hosts.py", "test_pytest_plugin.py",
    "run/test_engine.py", "run/execute/test_user_model.py", "report/test_html_in_a_browser.py",
    "run/findings/test_shrink.py", "run/test_shards.py", "cli/test_cli_torchrun.py",
    "script/test_shown.py", "test_sessions.py", "ranks/test_shortages.py",
    "memory/test_caching_allocator.py",
)  # fmt: skip
"""Those of more than half a minute."""


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
    """Deselect tests of a GPU where there is none, and long ones; run files that take long first.

    The header says what is not run. A worker that begins a long file last keeps the others waiting.
    """
    without = [] if has_gpu() else ["gpu"]
    by_name = bool(config.option.keyword) or any("::" in argument for argument in config.args)
    without += [] if WHOLE or by_name else ["long"]
    left = items if WHOLE or by_name else thinned(items)
    chosen = [item for item in left if not any(map(item.get_closest_marker, without))]
    kept = set(chosen)
    if out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=out)
    items[:] = sorted(chosen, key=lambda item: not any(map(item.path.match, LONG_FILES)))


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
        gc.set_threshold(20_000)  # the 700 of Python takes a fiftieth of all time


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


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_the_module() -> Iterator[None]:
    yield
    from borrowing import SHARED, end_ranks

    for pool in SHARED:
        end_ranks(pool)


@pytest.fixture(scope="session")
def session_pool() -> Iterator[Pool]:
    """Rank processes for the cases of all files, with `borrowed`. Sharders and faults are imported
    before they are forked."""
    from borrowing import shared

    from zerocheck.catalogue import BUILT_IN, INJECTED
    from zerocheck.faults.registry import FAULTS
    from zerocheck.ranks.pool import Pool
    from zerocheck.run.execute.rank_pool import TARGET

    planted = (fault.where for fault in FAULTS.values() if ":" in fault.where)
    places = (*BUILT_IN.values(), *INJECTED.values(), *planted)
    warm = sorted({place.partition(":")[0] for place in places})
    with shared(Pool(TARGET, warm=warm)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def deepspeed_pool() -> Iterator[Pool]:
    """The same, with DeepSpeed imported before they are forked."""
    from borrowing import shared

    from zerocheck.catalogue import OF_EXTRAS, modules_of
    from zerocheck.ranks.pool import Pool
    from zerocheck.run.execute.rank_pool import TARGET

    with shared(Pool(TARGET, warm=modules_of(OF_EXTRAS))) as ranks:
        yield ranks
