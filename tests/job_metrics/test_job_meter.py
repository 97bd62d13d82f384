"""Metrics of jobs on ranks: what is counted is right, and no rank waits for another."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from borrowing import Ask

from zerocheck.job_metrics.records import (
    CheckedStep,
    CheckpointTime,
    JobRecord,
    SeenPattern,
    StepSeconds,
    TimedStep,
)

PARAMETERS = 32 * 8 + 4 * (8 * 32 + 32 + 32 * 8 + 8) + 8 * 32 + 32
"""Of the model of `metric_targets`."""
# Kinds of collectives in a step, for each microbatch: calls. FSDP keeps its root gathered.
CALLS = {
    "ddp": {"all_reduce": 1},
    "blocks": {"all_gather": 2 * 4 + 1, "reduce_scatter": 5},
    "root": {"all_gather": 1, "reduce_scatter": 1},
    "fsdp1": {"all_gather": 2 * 4 + 1, "reduce_scatter": 5},
}


def read(folder: Path, name: str = "metrics.jsonl") -> list[JobRecord]:
    lines = (folder / name).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=JobRecord) for line in lines]


def of(folder: Path, kind: type) -> list[object]:
    return [one for one in read(folder) if isinstance(one, kind)]


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_counted(ask_job: Ask, tmp_path: Path, kind: str) -> None:
    answers = ask_job("job", folder=str(tmp_path), kind=kind, microbatches=2)
    assert [one["taken"] for one in answers] == [14, 14]
    records = read(tmp_path)
    assert [one.step for one in records if isinstance(one, StepSeconds)] == [*range(1, 15)]
    timed = [one for one in records if isinstance(one, TimedStep)]
    # Step 7 is checked: what was chosen goes to the next step, and 9 is weighed after it.
    assert [one.step for one in timed] == [5, 8, 10]
    for one in timed:
        assert {k.kind: k.calls for k in one.collectives} == {
            name: 2 * calls for name, calls in CALLS[kind].items()
        }
        assert (one.tokens, one.microbatches) == (2 * 2 * 2 * 5, 2)
        assert len(one.idle) == 2 and len(one.memory) == 2
        assert one.waited is not None and 0 < one.waited < 1 and 0 < one.forward < 1
        assert one.update is not None and 0 < one.update < 1
        for memory in one.memory:
            share = 1 if kind == "ddp" else 0.5
            assert memory.parameters == pytest.approx(4 * PARAMETERS * share, rel=0.1)
            assert memory.states == pytest.approx(2 * memory.parameters, rel=0.02, abs=150)
            assert memory.activations is not None and memory.activations > 0
            assert memory.allocated is None and memory.resident is not None
    checked = [one for one in records if isinstance(one, CheckedStep)]
    assert [(one.step, one.violated) for one in checked] == [(1, ()), (7, ())]
    assert timed[-1].tokens_per_second is not None


@pytest.mark.long
def test_patterns_of_a_job(ask_job: Ask, tmp_path: Path) -> None:
    """They are seen once, and stand in the summary."""
    root = ask_job("job", folder=str(tmp_path / "root"), kind="root", late=0.05)[0]["summary"]
    assert "everything is gathered at once: one all-gather has all " in root
    assert "a slow rank: rank 1 comes last in each of 3 timed steps" in root
    assert "many small collectives" not in root
    layers = ask_job("job", folder=str(tmp_path / "layers"), kind="layers")[0]["summary"]
    assert "many small collectives: " in layers and "for 10 layers" in layers
    blocks = ask_job("job", folder=str(tmp_path / "blocks"), kind="blocks")[0]["summary"]
    assert "gathered at once" not in blocks and "small collectives" not in blocks
    seen = [one.pattern for one in read(tmp_path / "root") if isinstance(one, SeenPattern)]
    assert len(seen) == len(set(seen)) and "a slow rank" in seen


def test_checkpoints_are_timed(ask_job: Ask, tmp_path: Path) -> None:
    answers = ask_job(
        "job", folder=str(tmp_path), kind="blocks", steps=2, saves=("one", "two", "two")
    )
    found = [one for one in read(tmp_path) if isinstance(one, CheckpointTime)]
    assert [(one.what, Path(one.folder).name, one.replaced) for one in found] == [
        ("save", "one", False),
        ("save", "two", False),
        ("save", "two", True),
        ("load", "two", False),
    ]
    assert all(one.seconds >= 0.05 for one in found[:3])
    assert "fragile checkpoints: 1 of 3 saves wrote over an older one" not in answers[1]["summary"]
    assert (
        "fragile checkpoints: 1 of 3 saves wrote over an older checkpoint in "
        in (answers[0]["summary"])
    )


def test_a_rank_that_leaves_a_timed_step_keeps_nobody(ask_job: Ask, tmp_path: Path) -> None:
    """The figures of that step never come; those of the next chosen one do."""
    answers = ask_job("job", folder=str(tmp_path), kind="ddp", raises=5)
    assert [one["taken"] for one in answers] == [14, 14]
    assert [one.step for one in of(tmp_path, TimedStep)] == [8, 10]  # type: ignore[attr-defined]


def test_a_disk_that_fails_ends_the_metrics_alone(ask_job: Ask, tmp_path: Path) -> None:
    answers = ask_job("job", folder=str(tmp_path), kind="ddp", broken=True)
    assert [one["taken"] for one in answers] == [14, 14]
    assert max(one.step for one in read(tmp_path)) == 3


def test_a_folder_that_cannot_be_made(ask_job: Ask, tmp_path: Path) -> None:
    """All ranks refuse it, before the training begins."""
    (tmp_path / "file").write_text("")
    for answer in ask_job("job", folder=str(tmp_path / "file" / "below"), kind="ddp"):
        assert answer["raised"] == "UsageError"
        assert "metrics cannot be written to" in answer["said"]


def test_the_last_steps_are_timed_one_in_so_many(ask_job: Ask, tmp_path: Path) -> None:
    ask_job("job", folder=str(tmp_path), kind="ddp", steps=36, every=10)
    assert [one.step for one in of(tmp_path, TimedStep)] == [5, 8, 10, 20, 30]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["ddp", "blocks", "root", "fsdp1", "fsdp1-flat"])
def test_the_size_of_a_model(ask_job: Ask, kind: str) -> None:
    """Whole, whatever a rank holds of it."""
    for size in ask_job("size", kind=kind):
        assert size["gathered"] == 4 * PARAMETERS and size["layers"] == 10
        assert size["largest"] == 4 * (8 * 32 + 32)
        assert size["tensors"] == 19
        assert size["sharded"] is (kind != "ddp")
        assert not size["offloaded"] and not size["compiled"]
