"""How a format is recognised, and how what cannot be read is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_checkpoints import WEIGHT, flip, found, plain, save_dcp, state
from safetensors.torch import save_file

from zerocheck.checkpoint.compare import compare
from zerocheck.checkpoint.examine import examine
from zerocheck.checkpoint.text import render
from zerocheck.errors import UsageError
from zerocheck.foreign_text import as_json


def test_a_pointer_to_the_latest(tmp_path: Path) -> None:
    save_dcp(state(), tmp_path / "generation-7")
    save_dcp({"broken": torch.tensor([torch.nan])}, tmp_path / "generation-6")
    for text in ("generation-7", "generation-7\n", "generation-7\n0123abcd\n"):
        (tmp_path / "latest").write_text(text)
        assert not examine(tmp_path).findings


def test_the_textbook_form(tmp_path: Path) -> None:
    """Names only, and what each rank has on its own beside the model."""
    tree = state()
    flat = {f"model.{name}": value for name, value in tree["model"].items() if name[0] != "4"}
    for name, held in tree["optim"]["state"].items():
        flat |= {f"optimizer.state.{name}.{kind}": value for kind, value in held.items()}
    flat["ranks.0.buffers.running"] = torch.ones(3)
    save_dcp(flat, tmp_path / "generation-1")
    (tmp_path / "latest").write_text("generation-1\n0123abcd\n")
    report = examine(tmp_path)
    assert not report.findings
    assert set(report.unchecked) == {"bounded"}
    assert any("ranks.0.buffers.running" in note for note in report.notes)
    flat["optimizer.state.0.weight.exp_avg_sq"][1, 1] = -1.0
    flat["ranks.0.buffers.running"][2] = torch.nan
    save_dcp(flat, tmp_path / "generation-1")
    assert found(examine(tmp_path)) == {
        ("nonnegative", f"exp_avg_sq {WEIGHT}"),
        ("finite", "other ranks.0.buffers.running"),
    }


@pytest.mark.parametrize("name", ["../outside", "/", ".", "", "generation-8"])
def test_a_pointer_to_nothing_or_outside(tmp_path: Path, name: str) -> None:
    save_dcp(state(), tmp_path / "here" / "generation-7")
    save_dcp(state(), tmp_path / "outside")
    (tmp_path / "here" / "latest").write_text(name)
    with pytest.raises(UsageError, match="which is no folder there"):
        examine(tmp_path / "here")


def test_what_is_missing_or_unknown(tmp_path: Path) -> None:
    save_dcp(state(), tmp_path / "runs" / "step-100")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.onnx").write_text("")
    for path, message in (
        ("rnus", "there is no checkpoint .*; did you mean 'runs'"),
        ("runs", "holds checkpoints in folders, name one: step-100"),
        ("notes.txt", "no checkpoint that zerocheck reads"),
        ("empty", "it is empty"),
        ("other", r"found: weights.onnx \(allowed: a directory of torch"),
        ("runs/step-100/.metadata", "is a part of a checkpoint; give its directory"),
        ("runs/step-100/__0_0.distcp", "is a part of a checkpoint"),
    ):
        with pytest.raises(UsageError, match=message):
            examine(tmp_path / path)


def test_deepspeed_in_parts_and_with_experts(tmp_path: Path) -> None:
    folder = tmp_path / "global_step10"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step10")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
    (damaged,) = examine(tmp_path).findings
    assert damaged.where == "mp_rank_00_model_states.pt" and damaged.check == "readable"
    (folder / "mp_rank_00_model_states.pt").rename(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    assert "the names and shapes of the model" in examine(folder).findings[0].detail
    (folder / "layer_3-model_states.pt").write_bytes(b"")
    with pytest.raises(
        UsageError, match="stages of a pipeline, or tensor parallelism are not read"
    ):
        examine(folder)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"module": 3}, "not the form that DeepSpeed writes"),
        ({"module": {}, "param_shapes": [{"a": [1 << 40, 1 << 40]}]}, "takes more bytes"),
        ([1, 2], "not the form that DeepSpeed writes"),
    ],
)
def test_what_deepspeed_never_wrote(tmp_path: Path, tree: Any, message: str) -> None:
    flat = {"fp32_flat_groups": [torch.ones(2)], "partition_count": 1}
    flat["optimizer_state_dict"] = {"state": {}, "param_groups": [{"params": [0]}]}
    torch.save(tree, tmp_path / "mp_rank_00_model_states.pt")
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": flat}, path)
    assert any(message in one.detail for one in examine(tmp_path).findings)
    flat["partition_count"] = 1 << 40
    torch.save({"optimizer_state_dict": flat}, path)
    if isinstance(tree, dict) and "param_shapes" in tree:
        with pytest.raises(UsageError, match="allowed: one number for all, from 1 to 65536"):
            examine(tmp_path)


def test_folders_of_one_checkpoint_are_read_together(tmp_path: Path) -> None:
    """As accelerate writes them; those that differ in numbers only are several."""
    for name, part in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optim")):
        save_dcp({part: state()[part]}, tmp_path / "one" / name)
    torch.save({"last_epoch": 3}, tmp_path / "one" / "scheduler.bin")
    report = examine(tmp_path / "one")
    assert not report.findings and "finite" in report.checked
    assert {role.role for role in report.checkpoints[0].roles} >= {"model", "exp_avg"}
    (tmp_path / "one" / "optimizer_0" / "__0_0.distcp").unlink()
    (missing,) = examine(tmp_path / "one").findings
    assert missing.where == "optimizer_0/__0_0.distcp" and "is missing" in missing.detail
    for name in ("step-1", "step-2"):
        save_dcp(state(), tmp_path / "several" / name)
    with pytest.raises(UsageError, match="in folders, name one: step-1, step-2"):
        examine(tmp_path / "several")


class Mine:
    """Of the user."""


def test_a_users_class_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"model": state()["model"], "arguments": Mine()}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=r"an object of test_recognising\.Mine"):
        examine(tmp_path / "model.pt")


def test_beside_others_it_is_left_out_and_said(tmp_path: Path) -> None:
    torch.save(Mine(), tmp_path / "training_args.bin")
    torch.save(state()["model"], tmp_path / "model.bin")
    report = examine(tmp_path)
    assert not report.findings
    assert any("test_recognising.Mine" in note for note in report.notes)


def test_model_and_optimizer_in_two_files(tmp_path: Path) -> None:
    tree = plain()
    save_file(tree["model"], tmp_path / "model.safetensors")
    torch.save(tree["optimizer"], tmp_path / "optimizer.pt")
    report = examine(tmp_path)
    assert not report.findings and not report.unchecked
    assert report.checkpoints[0].format == "safetensors and torch.save"
    assert not compare(tmp_path, tmp_path).findings
    # safetensors sorts, so equal shapes leave several ways.
    assert any("could not be matched" in note for note in report.notes)


def test_momentum_is_a_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "sgd.pt")
    report = examine(tmp_path / "sgd.pt")
    assert not report.findings and "moments" not in report.unchecked
    (described,) = report.checkpoints
    assert described.psi == 15
    assert {one.role for one in described.roles} == {"model", "momentum_buffer"}
    tree["optimizer"]["state"][0]["momentum_buffer"][1, 2] = torch.nan
    torch.save(tree, tmp_path / "wrong.pt")
    (wrong,) = examine(tmp_path / "wrong.pt").findings
    assert wrong.check == "finite" and wrong.where == "momentum_buffer weight"


def test_shapes_that_occur_once_are_enough(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.bias], "lr": 1e-2}, {"params": [model.weight]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(
        {"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path.parent / "1.pt"
    )
    for path in (tmp_path, tmp_path.parent / "1.pt"):
        groups_of = examine(path).checkpoints[0].groups
        assert [group.parameters for group in groups_of] == [("bias",), ("weight",)]
    assert not compare(tmp_path, tmp_path.parent / "1.pt").findings


def test_the_old_form_of_torch_save(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert not examine(tmp_path / "old.pt").findings


@pytest.mark.parametrize("length", [0, 10, 3000, -1])
def test_a_truncated_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    path.write_bytes(path.read_bytes()[:length])
    assert found(examine(path)) == {("readable", "model.pt")}


def test_a_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    tree = state()
    torch.save(tree, path)
    flip(path, path.read_bytes().index(tree["model"][WEIGHT].numpy().tobytes()) + 7)
    assert found(examine(path)) == {("readable", "model.pt")}


def sharded(directory: Path) -> dict[str, Any]:
    tensors = state()["model"]
    names = list(tensors)
    places = {}
    for part, chosen in enumerate((names[:6], names[6:]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, directory / file)
        places |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_sharded_model(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert not examine(tmp_path).findings
    torch.save(state()["model"], tmp_path.parent / "whole.pt")
    assert not compare(tmp_path, tmp_path.parent / "whole.pt").findings


def test_a_sharded_model_without_a_file(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert found(examine(tmp_path)) == {("files", "model-00002-of-00002.safetensors")}


def test_an_index_of_a_sharded_model_that_does_not_fit(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    places = index["weight_map"]
    places[WEIGHT] = "model-00002-of-00002.safetensors"
    del places["2.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert found(examine(tmp_path)) == {("files", WEIGHT), ("files", "2.weight")}
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert found(examine(tmp_path)) == {("files", "model.safetensors.index.json")}


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for part in (1, 2):
        save_file({WEIGHT: torch.ones(2)}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    assert found(examine(tmp_path)) == {("tiling", WEIGHT)}


def test_dtypes_of_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)
    tree = {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}
    tree |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0)}
    save_file(tree, tmp_path / "a.safetensors")
    torch.save(tree, tmp_path / "a.pt")
    assert not compare(tmp_path / "a.safetensors", tmp_path / "a.pt").findings
    tree["torch.float8_e4m3fn"][1] = torch.nan
    save_file(tree, tmp_path / "a.safetensors")
    assert found(examine(tmp_path / "a.safetensors")) == {("finite", "model torch.float8_e4m3fn")}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-5], {("files", "b")}),
        (lambda data: data + b"12345", {("files", "a.safetensors")}),
        (lambda data: data[:20], {("readable", "a.safetensors")}),
        (lambda data: b"", {("readable", "a.safetensors")}),
        (lambda data: data.replace(b"[4]", b"[3]"), {("readable", "a")}),
        (lambda data: data.replace(b'F32","shape":[4]', b'F99","shape":[4]'), {("readable", "a")}),
        (
            lambda data: data.replace(b"[16,24]", b"[12,20]"),
            {("files", "b"), ("files", "a.safetensors")},
        ),
    ],
)  # fmt: skip
def test_damaged_safetensors(tmp_path: Path, change: Any, expected: set[tuple[str, str]]) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, path)
    path.write_bytes(change(path.read_bytes()))
    assert found(examine(path)) == expected


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo, which is not read"),
        (torch.empty(4, dtype=torch.float4_e2m1fn_x2), "dtype torch.float4_e2m1fn_x2 is not read"),
    ],
)
def test_tensors_that_are_not_read_are_no_equal_ones(
    tmp_path: Path, tensor: torch.Tensor, words: str
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": tensor}, path)
    for report in (examine(path), compare(path, path)):
        assert report.exit_code == 1
        assert words in report.findings[0].detail
        text = render(report)
        assert "NOT READ unread" in text and "not all of it is read" in text
        assert "WRONG" not in text and "different" not in text
        assert json.loads(as_json(report))["findings"]


def test_a_file_without_tensors_is_nothing_to_check(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({}, path)
    for look in (examine, lambda one: compare(one, one)):
        with pytest.raises(UsageError, match="holds no tensor, so there is nothing to check"):
            look(path)


def test_what_would_have_a_reader_wait_is_no_file(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    for name in ("latest", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
    assert not [one for one in examine(tmp_path).findings if one.check == "readable"]
