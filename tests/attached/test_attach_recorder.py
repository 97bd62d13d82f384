"""Flight recorder of `attach`: the first wrong step is found, in bounded bytes, and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask
from click.testing import CliRunner
from decaying import DecaysTwice
from torch import nn

import zerocheck
from zerocheck.attached import recorder
from zerocheck.cli import main
from zerocheck.errors import UsageError, Violated

# (sharding, fault that begins in step 37): obligation
FIRST = {
    ("ddp", "moment_scaled"): "update",
    ("fsdp1", "decay_twice"): "update",
    ("fsdp2", "decay_twice"): "update",
    ("fsdp2", "frozen_moved"): "update",
    ("ddp", "not_reduced"): "gradient",
    ("ddp", "parted_before"): "publish",
    ("ddp", "skips_on_one_rank"): "update",
}


@pytest.mark.every(4)
@pytest.mark.parametrize(("sharding", "fault"), FIRST)
def test_the_first_wrong_step(ask: Ask, tmp_path: Path, sharding: str, fault: str) -> None:
    obligation = FIRST[sharding, fault]
    given = {"sharding": sharding, "fault": fault, "begins": 37, "every": 10}
    for answer in ask("train", steps=41, recorder="1GiB", **given):
        assert answer["raised"] == "Violated"
        assert answer["said"].startswith(f"step 37: {obligation}: ")
        assert " (found at step 40)" in answer["said"]
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "kept" / "step-37")])
    assert "reproduced: the same verdict on step 37" in done.output
    right = CliRunner().invoke(main, ["replay", str(tmp_path / "kept" / "recorder" / "step-36")])
    assert right.exit_code == 0, right.output
    assert "step 36 was recorded and not judged: all that can be judged of it holds" in right.output


def test_steps_that_hold_leave_nothing(ask: Ask, tmp_path: Path) -> None:
    """Forty right steps, and three after the last checked one, which stay for `replay`."""
    for answer in ask("train", sharding="fsdp2", steps=43, every=10, recorder="1GiB"):
        assert answer == {"taken": 43}
    left = {one.name for one in (tmp_path / "kept" / "recorder").iterdir()}
    assert left == {"step-41", "step-42", "step-43"}


def run(
    directory: Path,
    *,
    wrong: int = 1,
    once: bool = False,
    count: int = 12,
    kind: type[DecaysTwice] = DecaysTwice,
    second: int = 0,
    **options: Any,
) -> zerocheck.Attached:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    if isinstance(optimizer, WrongTwice):
        optimizer.second = second
    else:
        optimizer.wrong, optimizer.once = wrong, once
    given = {"steps": (), "every": 10, "directory": directory, **options}
    check = zerocheck.attach(model, optimizer, **given)
    for _ in range(count):
        with check.step():
            model(torch.randn(4, 40)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return check


def test_a_ring_that_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine steps two are kept, and the first wrong one is not among them."""
    run(tmp_path / "one", wrong=99, count=2, recorder="1GiB")
    step = tmp_path / "one" / "recorder" / "step-2"
    limit = int(2.5 * sum(one.stat().st_size for one in step.iterdir()))
    sizes: list[int] = []
    original = recorder.FlightRecorder.keep

    def keep(self: recorder.FlightRecorder, *given: Any) -> None:
        original(self, *given)
        files = [one for one in self.place.rglob("*") if one.is_file()]
        sizes.append(sum(one.stat().st_size for one in files))

    monkeypatch.setattr(recorder.FlightRecorder, "keep", keep)
    with pytest.raises(Violated, match="step 8: update"):
        run(tmp_path, wrong=3, recorder=limit)
    assert len(sizes) == 9 and 0.6 * limit < max(sizes) <= limit
    said = capsys.readouterr().err
    text = "8 is the first wrong one of those kept; steps 1 to 7 were not kept; found as step 10 "
    assert f"  first step  {text}" in said


@pytest.mark.parametrize("wrong", [1, 3, 8, 9, 10])
def test_many_recorded_steps_are_halved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setattr(recorder, "MOST_JUDGED", 4)
    with pytest.raises(Violated, match=f"^step {wrong}: update"):
        run(tmp_path, wrong=wrong, recorder="1GiB")
    said = capsys.readouterr().err
    if wrong > 1:
        text = f"step {wrong - 1} holds; 3 of 9 recorded steps were judged"
        assert f"{wrong} is the first wrong one: {text}" in said


def test_all_that_is_recorded_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Violated, match=r"^step 10: update"):
        run(tmp_path, wrong=10, recorder=2**30)
    text = "10 is the first wrong one: steps 1 to 9 were recorded and hold\n"
    assert text in capsys.readouterr().err


def test_a_wrong_step_that_no_check_meets(tmp_path: Path) -> None:
    """The next checked step holds, so nobody asks for the steps before it."""
    check = run(tmp_path, wrong=5, once=True, recorder="1GiB")
    assert check.wrong == 0
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "recorder" / "step-11")])
    assert done.exit_code == 0


def test_the_last_steps_of_a_job_that_died(tmp_path: Path) -> None:
    run(tmp_path, wrong=5, count=7, recorder="1GiB")
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "recorder" / "step-5")])
    assert done.exit_code == 1
    assert "weight decay twice" in done.output
    assert "step 5 was recorded and not judged: it violates update" in done.output


def test_without_a_recorder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Violated, match=r"^step 10: update"):
        run(tmp_path, wrong=3)
    assert "  before it   steps 1 to 9 were not checked" in capsys.readouterr().err
    assert not (tmp_path / "recorder").exists()


class WrongTwice(DecaysTwice):
    """Decays twice in step 1, and from step `second` on it does not decay at all."""

    second = 0
    wrong, once = 1, True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] = 0.0 if self.taken + 1 >= self.second else 0.1
        super().step(closure)
        for group in self.param_groups:
            group["weight_decay"] = 0.1


@pytest.mark.parametrize(
    ("second", "options", "note"),
    [
        (2, {}, ""),
        (4, {}, "  before it   steps 2 to 3 were not checked"),
        (
            3,
            {"recorder": "1GiB"},
            "  first step  3 is the first wrong one since step 1: step 2 was",
        ),
    ],
)
def test_a_wrong_step_after_another_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    second: int,
    options: dict[str, Any],
    note: str,
) -> None:
    """A step that was checked and is wrong was checked."""
    steps = (1, 4 if options else second)
    run(tmp_path, kind=WrongTwice, second=second, steps=steps, on_violation="warn", **options)
    first, further = capsys.readouterr().err.split("VIOLATED", 2)[1:]
    assert "weight decay twice" in first and "weight decay missing" in further
    assert "not checked" not in first
    assert note in further if note else "before it" not in further


def test_an_earlier_recorder_is_kept(tmp_path: Path) -> None:
    run(tmp_path, wrong=99, count=2, recorder="1GiB")
    run(tmp_path, wrong=99, count=3, recorder="1GiB")
    assert {one.name for one in tmp_path.iterdir()} == {"recorder", "recorder-2"}
    assert len(list((tmp_path / "recorder").iterdir())) == 2


def test_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is larger than the ring ends the recording, and not the training."""
    check = run(tmp_path, wrong=99, recorder="1KiB")
    said = capsys.readouterr().err
    assert said.count("steps between the checked ones are not recorded") == 1
    assert "a step takes " in said and "recorder= 1.000 KiB" in said
    assert check.taken == 12 and check.last is not None and not check.last.violations


@pytest.mark.parametrize("given", ["much", 0, 1.5, True, "5"])
def test_no_size(tmp_path: Path, given: Any) -> None:
    with pytest.raises(UsageError, match=r"recorder is|is not a size|has no unit"):
        run(tmp_path, wrong=99, recorder=given)


def test_a_gradient_is_traced(ask: Ask) -> None:
    """A reference judges recorded steps as well: two microbatches, the gradient times W from 4."""
    for answer in ask("recorded_gradient", begins=4):
        assert answer["raised"] == "Violated"
        assert answer["said"].startswith("step 4: gradient: "), answer
        assert "gradient is 2 times too large: summed over 2 ranks" in answer["said"]


def test_the_summary(tmp_path: Path) -> None:
    check = run(tmp_path, wrong=25, count=40, every=5, on_violation="warn")
    assert check.wrong == 4
    text = check.summary
    assert text.startswith("zerocheck: 8 of 40 steps checked, 4 of them wrong\n")
    assert "  from step 25, and in 3 more: update: parameter is wrong: weight decay" in text
    right = run(tmp_path, wrong=99, count=12, every=5)
    assert right.summary.startswith("zerocheck: 2 of 12 steps checked, all hold (")


def test_the_disk_of_one_rank_fails(ask: Ask) -> None:
    """No rank waits for another: what all of them kept is judged, which is nothing."""
    first, second = ask("recorder_of_one_rank")
    assert first["wrong"] == second["wrong"] == 1
    assert "steps between the checked ones are not recorded" in second["message"]
    assert "6 is the first wrong one of those kept; steps 1 to 5 were not kept" in first["message"]
