"""Wrong values in one checkpoint: each is seen, and nothing else is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_checkpoints import BIAS, WEIGHT, detail, found, plain, save_dcp, state

from zerocheck.checkpoint.examine import examine

State = dict[str, Any]
OTHER_WEIGHT = "2.weight"


def of(tree: State, name: str = WEIGHT) -> dict[str, torch.Tensor]:
    return tree["optim"]["state"][name]  # type: ignore[no-any-return]


def nan(tree: State) -> None:
    tree["model"][WEIGHT][1, 2] = torch.nan


def infinite_moment(tree: State) -> None:
    of(tree)["exp_avg"][3, 0] = -torch.inf


def nan_in_a_buffer(tree: State) -> None:
    tree["model"]["1.running_var"][4] = torch.nan


def negative(tree: State) -> None:
    of(tree)["exp_avg_sq"][2, 1] = -1e-12


def above_its_maximum(tree: State) -> None:
    of(tree)["max_exp_avg_sq"][0, 1] = of(tree)["exp_avg_sq"][0, 1] * (1 - 2.0**-23)


def reset_step(tree: State) -> None:
    of(tree, BIAS)["step"].fill_(1)


def half_a_step(tree: State) -> None:
    for one in tree["optim"]["state"].values():
        one["step"].fill_(2.5)


def no_step_taken(tree: State) -> None:
    for one in tree["optim"]["state"].values():
        one["step"].zero_()


def step_with_a_shape(tree: State) -> None:
    of(tree, BIAS)["step"] = torch.ones(2)


def lost_moment(tree: State) -> None:
    del of(tree, BIAS)["exp_avg_sq"]


def lost_maximum(tree: State) -> None:
    del of(tree)["max_exp_avg_sq"]


def all_second_moments_lost(tree: State) -> None:
    for one in tree["optim"]["state"].values():
        del one["exp_avg_sq"]


def lost_step(tree: State) -> None:
    del of(tree, BIAS)["step"]


def moment_of_another(tree: State) -> None:
    of(tree)["exp_avg"] = of(tree, OTHER_WEIGHT)["exp_avg"]


def transposed_moment(tree: State) -> None:
    of(tree)["exp_avg_sq"] = of(tree)["exp_avg_sq"].T.contiguous()


def swapped_moments(tree: State) -> None:
    one = of(tree)
    one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]


def lost_second_moment_values(tree: State) -> None:
    of(tree)["exp_avg_sq"].zero_()


def scaled(tree: State) -> None:
    of(tree, BIAS)["exp_avg"].mul_(64)


def unknown_parameter(tree: State) -> None:
    del tree["model"][BIAS]


def here(check: str, role: str, name: str = WEIGHT) -> set[tuple[str, str]]:
    return {(check, f"{role} {name}".strip())}


DAMAGES: list[tuple[Callable[[State], None], set[tuple[str, str]]]] = [
    (nan, here("finite", "model")),
    (infinite_moment, here("finite", "exp_avg")),
    (nan_in_a_buffer, here("finite", "model", "1.running_var")),
    (negative, here("nonnegative", "exp_avg_sq") | here("bounded", "exp_avg")),
    (above_its_maximum, here("nonnegative", "max_exp_avg_sq")),
    (reset_step, here("steps", "step", BIAS)),
    (step_with_a_shape, here("steps", "step", BIAS)),
    (lost_moment, here("moments", "exp_avg_sq", BIAS)),
    (lost_maximum, here("moments", "max_exp_avg_sq")),
    (lost_step, here("moments", "step", BIAS)),
    (moment_of_another, here("moments", "exp_avg")),
    (transposed_moment, here("moments", "exp_avg_sq")),
    (lost_second_moment_values, here("bounded", "exp_avg")),
    (scaled, here("bounded", "exp_avg", BIAS)),
    (unknown_parameter, {("moments", BIAS)}),
]


@pytest.mark.parametrize("form", ["dcp", "torch.save"])
@pytest.mark.parametrize(("damage", "expected"), DAMAGES, ids=[one.__name__ for one, _ in DAMAGES])
def test_it_is_seen(
    tmp_path: Path, damage: Callable[[State], None], expected: set[tuple[str, str]], form: str
) -> None:
    tree = state()
    damage(tree)
    if form == "dcp":
        report = examine(save_dcp(tree, tmp_path / "saved"))
    else:
        torch.save(tree, tmp_path / "saved.pt")
        report = examine(tmp_path / "saved.pt")
    assert expected <= found(report)
    # A step that was set back makes the bound of the same parameter tighter.
    assert found(report) - expected <= here("bounded", "exp_avg", BIAS)


@pytest.mark.parametrize("damage", [half_a_step, no_step_taken])
def test_steps_that_no_training_has(tmp_path: Path, damage: Callable[[State], None]) -> None:
    tree = state()
    damage(tree)
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert {check for check, _ in found(report)} == {"steps"}
    assert len(report.findings) == 8
    assert "bounded" in report.unchecked


def test_all_second_moments_are_missed(tmp_path: Path) -> None:
    tree = state()
    all_second_moments_lost(tree)
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert {check for check, _ in found(report)} == {"moments"}
    assert len(report.findings) == 8
    assert "nonnegative" in report.unchecked


def test_swapped_moments_are_negative(tmp_path: Path) -> None:
    tree = state()
    swapped_moments(tree)
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert ("nonnegative", f"exp_avg_sq {WEIGHT}") in found(report)
    assert {where.split()[-1] for _, where in found(report)} == {WEIGHT}


def test_the_first_element_is_named(tmp_path: Path) -> None:
    tree = state()
    tree["model"][WEIGHT][1, 2:] = torch.nan
    report = examine(save_dcp(tree, tmp_path / "saved"))
    message = detail(report, "finite", f"model {WEIGHT}")
    assert message == "3 of 35 elements, first [1, 2] is nan"


def test_parameters_without_state_are_noted(tmp_path: Path) -> None:
    tree = state()
    del tree["optim"]["state"][BIAS]
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert not report.findings
    notes = "\n".join(report.notes)
    assert f"never stepped: {BIAS}" in notes
    assert "4.weight, 4.bias" in notes and "1.running_mean" in notes


def test_other_tensors_are_noted_and_checked(tmp_path: Path) -> None:
    """A number may be infinite until it is set, such as the best score so far."""
    tree = {**state(), "ema": {WEIGHT: torch.tensor([1.0, torch.inf])}}
    tree["best"] = torch.tensor(torch.inf)
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert found(report) == {("finite", f"other ema.{WEIGHT}")}
    assert any("unknown role" in note and f"ema.{WEIGHT}" in note for note in report.notes)
    assert "numbers of unknown role that are not finite: best" in report.notes


def test_a_fused_parameter_that_the_model_has_in_parts(tmp_path: Path) -> None:
    """As torchtitan saves it: the state dict splits what the optimizer has whole."""
    tree = state()
    weight = tree["model"].pop(WEIGHT)
    tree["model"]["0.q.weight"], tree["model"]["0.k.weight"] = weight[:2], weight[2:]
    report = examine(save_dcp(tree, tmp_path / "saved"))
    assert not report.findings
    note = f"the model has {WEIGHT} in parts, which are not compared: 0.q.weight, 0.k.weight"
    assert note in report.notes
    del tree["model"]["0.k.weight"]
    report = examine(save_dcp(tree, tmp_path / "wrong"))
    assert found(report) == {("moments", WEIGHT)}


@pytest.mark.parametrize("dcp", [True, False])
def test_numbers_are_matched_to_names(tmp_path: Path, dcp: bool) -> None:
    tree = plain()
    tree["optimizer"]["state"][4]["exp_avg_sq"][0, 0] = -1
    path = tmp_path / "saved.pt"
    if dcp:
        save_dcp(tree, path := tmp_path / "saved")
    else:
        torch.save(tree, path)
    report = examine(path)
    assert ("nonnegative", "exp_avg_sq 2.weight") in found(report)
    assert any("matched to names" in note for note in report.notes)


def test_numbers_that_could_mean_several_stay(tmp_path: Path) -> None:
    tree = plain()
    del tree["model"]["3.bias"]
    tree["optimizer"]["state"][4]["exp_avg_sq"][0, 0] = -1
    torch.save(tree, tmp_path / "saved.pt")
    report = examine(tmp_path / "saved.pt")
    assert ("nonnegative", "exp_avg_sq parameter 4") in found(report)
    assert any("could not be matched" in note for note in report.notes)


def test_a_model_alone(tmp_path: Path) -> None:
    torch.save(state()["model"], tmp_path / "model.pth")
    report = examine(tmp_path)
    assert not report.findings
    assert report.checked == ("files", "tiling", "readable", "finite")
    assert set(report.unchecked) == {"nonnegative", "steps", "moments", "bounded"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "net.inner."])
def test_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    tree = state()
    tree["model"] = {prefix + name: value for name, value in tree["model"].items()}
    torch.save(tree, tmp_path / "saved.pt")
    report = examine(tmp_path / "saved.pt")
    assert not report.findings
    assert any("4.weight" in note for note in report.notes)
