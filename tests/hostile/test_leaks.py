"""Code that leaves global state changed does not poison the cases of others on the same ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowing import borrowed
from slices import sliced

from zerocheck.case.schema import Case, Training
from zerocheck.drive.leaks.patches import Code, Namespaces
from zerocheck.models import blocks
from zerocheck.protocol.verdicts import MEMORY
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

sys.path.insert(0, str(Path(__file__).parent))

from leaking import LEAKS

SUBJECTS = Path(__file__).with_name("leaking.py")
CASE = Case(training=Training(steps=1))
UNSAID = ("random_state", "module_of_dynamo", "bar_of_tqdm")
OFTEN = (
    "default_dtype", "device_context", "inference_mode", "all_reduce", "adamw_step", "forward_hook",
    "dispatch_mode", "group_destroyed_by_one", "lone_collective", "lone_send", "operator", "path",
    "environment", "filters_of_warnings", *UNSAID,
)  # fmt: skip
"""Those of the slice: at least one of each place that the guard looks at."""


@pytest.mark.parametrize("place", [Namespaces, Code])
def test_looking_for_changes_warns_of_nothing(place: type[Namespaces | Code]) -> None:
    """Deprecated names of torch warn when their class is asked for, and a crash would show it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not list(place().changes())


@pytest.mark.parametrize(("name", "leaks"), [("__compiled_fn_7_ab", 0), ("some_function", 1)])
def test_what_torch_compile_forgets_is_no_leak(
    name: str, leaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, name, lambda: None, raising=False)
    place = Namespaces()
    monkeypatch.undo()
    assert len(list(place.changes())) == leaks


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", sliced(tuple(LEAKS), OFTEN))
def test_the_next_case_is_judged_as_in_fresh_ranks(pool: Pool, name: str) -> None:
    """A leak is named, and undone or its ranks replaced; a right implementation after it holds."""
    _, message, undone = LEAKS[name]
    first = Trial(pool, f"{SUBJECTS}:{name}", CASE)
    result = first.result()
    assert result.segments[0].outcome == "finished", result.segments[0].summary()
    leaks, team = result.segments[0].leaks, result.segments[0].team
    assert first.judged(result).status == "holds"
    if message:
        assert any(message in leak for leak in leaks), leaks
        assert undone == (not any("ranks were replaced" in leak for leak in leaks)), leaks
    else:
        assert not leaks
    second = Trial(pool, "zero2", CASE)
    result = second.result()
    assert not result.segments[0].leaks
    assert (result.segments[0].team == team) == undone
    outcome = second.judged(result)
    assert outcome.status == "holds", outcome.reason or outcome.judgement


def test_a_measurement_leaves_nothing(pool: Pool) -> None:
    """torch's profiler reads an environment variable that keeps it quiet."""
    trial = Trial(pool, "zero2", CASE, obligations=(*MEMORY, "update"))
    result = trial.result()
    assert trial.judged(result).status == "holds"
    assert [segment.leaks for segment in result.all] == [()] * len(result.all)
