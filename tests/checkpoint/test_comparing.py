"""Two checkpoints that differ: each difference is seen and explained, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_checkpoints import BIAS, WEIGHT, detail, edit_index, found, plain, save_dcp, state

from zerocheck.checkpoint.compare import compare

State = dict[str, Any]


def of(tree: State, name: str = WEIGHT) -> dict[str, torch.Tensor]:
    return tree["optim"]["state"][name]  # type: ignore[no-any-return]


def compared(tmp_path: Path, damage: Callable[[State], None]) -> Any:
    """A checkpoint against the same with a damage, in another format."""
    tree = state()
    torch.save(tree, tmp_path / "whole.pt")
    other = state()
    damage(other)
    save_dcp(other, tmp_path / "damaged")
    return compare(tmp_path / "whole.pt", tmp_path / "damaged")


def one_bit(tree: State) -> None:
    tree["model"][WEIGHT].view(torch.int32)[6, 4] ^= 1


def minus_zero(tree: State) -> None:
    tree["model"]["1.running_mean"].zero_().neg_()


def rolled(tree: State) -> None:
    tree["model"][WEIGHT] = tree["model"][WEIGHT].roll(3)


def rolled_rows(tree: State) -> None:
    tree["model"][WEIGHT] = tree["model"][WEIGHT].roll(2, dims=0)


def permuted(tree: State) -> None:
    tree["model"][WEIGHT] = tree["model"][WEIGHT].flip(0, 1)


def zeroed(tree: State) -> None:
    of(tree)["exp_avg"].zero_()


def another(tree: State) -> None:
    of(tree)["exp_avg"] = of(tree)["exp_avg_sq"]


def moment_of_a_twin(tree: State) -> None:
    of(tree, "1.weight")["exp_avg"] = of(tree, "1.bias")["exp_avg"]


EXPLAINED = [
    (one_bit, f"model {WEIGHT}", None),
    (rolled, f"model {WEIGHT}", "shifted by 3 of 35 elements"),
    (rolled_rows, f"model {WEIGHT}", "shifted by 2 of 7 rows"),
    (permuted, f"model {WEIGHT}", "the same values in another order"),
    (zeroed, f"exp_avg {WEIGHT}", "the other is all zeros"),
    (
        another,
        f"exp_avg {WEIGHT}",
        f"the other has the values that the first has in exp_avg_sq {WEIGHT}",
    ),
    (
        moment_of_a_twin,
        "exp_avg 1.weight",
        "the other has the values that the first has in exp_avg 1.bias",
    ),
]


@pytest.mark.parametrize(
    ("damage", "where", "why"), EXPLAINED, ids=[one.__name__ for one, _, _ in EXPLAINED]
)
def test_a_tensor_that_differs(
    tmp_path: Path, damage: Callable[[State], None], where: str, why: str | None
) -> None:
    report = compared(tmp_path, damage)
    assert found(report) == {("values", where)}
    message = detail(report, "values", where)
    if why is None:
        assert ";" not in message
    else:
        assert message.endswith(f"; {why}")


def test_the_difference_in_figures(tmp_path: Path) -> None:
    def change(tree: State) -> None:
        tree["model"][WEIGHT][2, 1:3] = torch.tensor([0.5, -2.0])

    message = detail(compared(tmp_path, change), "values", f"model {WEIGHT}")
    one, other = state()["model"][WEIGHT][2, 1:3].tolist()
    assert abs(one - 0.5) < other + 2
    assert message == (
        f"2 of 35 elements, first [2, 1]: {one:.9g} and 0.5, largest difference {other + 2:.9g}"
    )


def test_bits_count(tmp_path: Path) -> None:
    """-0 is not 0, and a NaN is itself."""

    def zero(tree: State) -> None:
        tree["model"]["1.running_mean"].zero_()

    def negative_zero(tree: State) -> None:
        zero(tree)
        tree["model"]["1.running_mean"].neg_()

    for name, changes in (("a", zero), ("b", negative_zero)):
        tree = state()
        changes(tree)
        tree["model"][WEIGHT][0, 0] = torch.nan
        save_dcp(tree, tmp_path / name)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert found(report) == {("values", "model 1.running_mean")}


def swapped_names(tree: State) -> None:
    held = tree["model"]
    held["1.weight"], held["1.bias"] = held["1.bias"], held["1.weight"]


def test_swapped_names(tmp_path: Path) -> None:
    report = compared(tmp_path, swapped_names)
    assert found(report) == {("values", "model 1.weight"), ("values", "model 1.bias")}
    assert "the other has the values that the first has in model 1.bias" in detail(
        report, "values", "model 1.weight"
    )


def test_names_in_only_one(tmp_path: Path) -> None:
    def rename(tree: State) -> None:
        tree["model"]["5.weight"] = tree["model"].pop("4.weight")

    report = compared(tmp_path, rename)
    assert found(report) == {("names", "model 4.weight"), ("names", "model 5.weight")}
    assert detail(report, "names", "model 4.weight").endswith("whole.pt")


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    def change(tree: State) -> None:
        tree["model"]["4.weight"] = torch.zeros(2, 3)
        tree["model"]["1.running_var"] = tree["model"]["1.running_var"].double()
        tree["model"][WEIGHT] = tree["model"][WEIGHT].bfloat16()

    report = compared(tmp_path, change)
    assert found(report) == {
        ("shapes", "model 4.weight"),
        ("shapes", "model 1.running_var"),
        ("shapes", f"model {WEIGHT}"),
        ("values", f"model {WEIGHT}"),
    }


def test_steps_and_settings(tmp_path: Path) -> None:
    def change(tree: State) -> None:
        of(tree, BIAS)["step"].add_(1)
        tree["optim"]["param_groups"][0]["lr"] = 5e-3
        tree["optim"]["param_groups"][1]["betas"] = (0.9, 0.99)
        tree["optim"]["param_groups"][1]["foreach"] = True

    report = compared(tmp_path, change)
    assert found(report) == {
        ("steps", f"step {BIAS}"),
        ("settings", "lr of 0.weight and 2 more"),
        ("settings", "betas of 0.bias and 4 more"),
    }
    assert detail(report, "settings", "lr of 0.weight and 2 more") == "0.01 and 0.005"


def test_groups_in_another_order_are_equal(tmp_path: Path) -> None:
    def reorder(tree: State) -> None:
        tree["optim"]["param_groups"].reverse()

    assert not compared(tmp_path, reorder).findings


def test_other_values(tmp_path: Path) -> None:
    def add(tree: State) -> None:
        tree["epoch"] = 4

    assert found(compared(tmp_path, add)) == {("settings", "epoch")}


def test_a_reset_optimizer(tmp_path: Path) -> None:
    def reset(tree: State) -> None:
        for one in tree["optim"]["state"].values():
            for tensor in one.values():
                tensor.zero_()

    report = compared(tmp_path, reset)
    assert {check for check, _ in found(report)} == {"values", "steps"}
    assert len([one for one in report.findings if one.check == "steps"]) == 8
    assert all("all zeros" in one.detail for one in report.findings if one.check == "values")


def test_damage_is_named_and_not_compared(written: Path, tmp_path: Path) -> None:
    import shutil

    directory = Path(shutil.copytree(written / "fsdp2-2-nested", tmp_path / "damaged"))
    name = f"model.{WEIGHT}"
    edit_index(directory, lambda index: index.state_dict_metadata[name].chunks.pop())
    (directory / "__1_0.distcp").write_bytes(b"")
    report = compare(directory, written / "fsdp2-2-full.pt")
    checks = {check for check, _ in found(report)}
    assert {"files", "tiling", "readable"} <= checks
    assert ("tiling", f"model {WEIGHT}") in found(report)
    assert "values" not in checks


def test_numbers_against_names(tmp_path: Path) -> None:
    tree = plain()
    torch.save(tree, tmp_path / "numbers.pt")
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    optimizer = tree["optimizer"]
    optimizer["state"] = {names[key]: value for key, value in optimizer["state"].items()}
    optimizer["param_groups"][0]["params"] = names
    save_dcp(tree, tmp_path / "names")
    assert not compare(tmp_path / "numbers.pt", tmp_path / "names").findings


def test_a_model_under_a_prefix(tmp_path: Path) -> None:
    tree = state()["model"]
    torch.save(tree, tmp_path / "one.pt")
    torch.save({f"net.{name}": value for name, value in tree.items()}, tmp_path / "other.pt")
    for paths in (("one.pt", "other.pt"), ("other.pt", "one.pt")):
        assert not compare(*(tmp_path / path for path in paths)).findings
