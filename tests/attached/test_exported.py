"""Exports and checkpoints in files: they hold what was trained, or what differs is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from asking import Ask
from click.testing import CliRunner
from test_published import Trained
from torch import nn

import zerocheck
from zerocheck.checkpoint.safetensors_file import write_safetensors
from zerocheck.cli.checkpoint import checkpoint
from zerocheck.errors import UsageError, Violated

Weights = dict[str, torch.Tensor]


class Stacked(nn.Module):
    """Fused attention, experts in one tensor, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.experts = nn.Parameter(torch.randn(12, 4, 8))
        self.out = nn.Linear(8, 4, bias=False)


NAMES = {
    ("h.q.*", "h.k.*", "h.v.*"): "qkv.*",
    "h.experts.*.weight": "experts.T",
    "h.out": "out.weight.T",
}


def export(model: Stacked, dtype: torch.dtype = torch.float32) -> Weights:
    """The weights with projections and experts of their own, some of them transposed."""
    weights = {}
    for part, whole in model.qkv.named_parameters():
        for name, piece in zip("qkv", whole.chunk(3), strict=True):
            weights[f"h.{name}.{part}"] = piece
    for number, expert in enumerate(model.experts):
        weights[f"h.experts.{number}.weight"] = expert.mT
    weights["h.out"] = model.out.weight.mT
    return {name: one.detach().to(dtype).clone() for name, one in weights.items()}


def sharded(folder: Path, weights: Weights) -> Path:
    """Write an index and two files of safetensors, as transformers does."""
    folder.mkdir()
    names, places = [*weights], {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(folder / file, {name: weights[name].contiguous() for name in part})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_export_holds(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Stacked()
    check = zerocheck.attach(model, torch.optim.AdamW(model.parameters()))
    folder = sharded(tmp_path / "export", export(model, dtype))
    check.exported(folder, names=NAMES)
    assert (check.wrong, check.summary) == (
        0,
        "zerocheck: 0 of 0 steps checked; 0 of 1 exports wrong",
    )
    torch.save({"model": model.state_dict()}, tmp_path / "trained.pt")
    assert zerocheck.compare_weights(folder, tmp_path / "trained.pt", names=NAMES) == ()


def exchanged(weights: Weights) -> None:
    weights["h.k.weight"], weights["h.v.weight"] = weights["h.v.weight"], weights["h.k.weight"]


def another_order(weights: Weights) -> None:
    one, other = "h.experts.1.weight", "h.experts.10.weight"
    weights[one], weights[other] = weights[other], weights[one]


def not_transposed(weights: Weights) -> None:
    weights["h.out"] = weights["h.out"].mT


def in_fp16(weights: Weights) -> None:
    weights["h.out"] = weights["h.out"].half()


def lost(weights: Weights) -> None:
    del weights["h.out"]


def zeros(weights: Weights) -> None:
    weights["h.q.bias"] *= 0
    weights["h.k.bias"] *= 0
    weights["h.v.bias"] *= 0


def adapter(weights: Weights) -> None:
    weights["h.q.lora_A.weight"] = torch.randn(2, 8)


WRONG = {
    exchanged: "h.q.weight and 2 more is what was saved in part only: elements in [60,",
    another_order: "is what was saved in part only: elements in [24, 72), [312, 360) differ",
    not_transposed: "h.out has another shape than was saved: [8, 4] in place of [4, 8]",
    in_fp16: "h.out is torch.float16, and torch.float32 was saved",
    lost: "out.weight was trained, and is missing here",
    zeros: "h.q.bias and 2 more is 0",
    adapter: "h.q.lora_A.weight is not in the record of training",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_export_is_named(tmp_path: Path, change: Callable[[Weights], None]) -> None:
    model = Stacked()
    weights = export(model)
    change(weights)
    folder = sharded(tmp_path / "export", weights)
    check = zerocheck.attach(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(Violated) as raised:
        check.exported(folder, names=NAMES)
    assert WRONG[change] in str(raised.value) and check.wrong == 1
    assert "1 of 1 exports wrong" in check.summary


def test_a_part_is_compared_alone(tmp_path: Path) -> None:
    """Adapters, and what is tied to a tensor that is here."""
    model = Trained()
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    weights = {"base.layers.0.q.weight": model.layers[0]["q"].weight.detach().clone()}
    names = {"base.**": "**"}
    compare = zerocheck.compare_weights
    assert compare(weights, tmp_path / "trained.pt", names=names, partial=True) == ()
    (text,) = compare(weights, tmp_path / "trained.pt", names=names)
    assert "was trained, and is missing here" in text
    untied = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    assert compare(untied, tmp_path / "trained.pt") == ()


def run(*words: object) -> tuple[int, str]:
    ended = CliRunner().invoke(checkpoint, [str(word) for word in words], standalone_mode=False)
    if isinstance(ended.exception, Exception):
        raise ended.exception
    return ended.return_value, ended.output


def test_the_command_compares_an_export(tmp_path: Path) -> None:
    model = Stacked()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "trained")
    asked = [
        "--against",
        tmp_path / "trained",
        "--name=h.q.*,h.k.*,h.v.*=qkv.*",
        "--name=h.experts.*.weight=experts.T",
        "--name=h.out=out.weight.T",
    ]
    code, text = run(sharded(tmp_path / "right", export(model)), *asked)
    assert code == 0 and "verified: 19 tensors against" in text, text
    weights = export(model)
    weights["h.out"] += 1
    code, text = run(sharded(tmp_path / "wrong", weights), *asked)
    assert code == 1 and "WRONG trained: weights that are not what was trained" in text, text
    assert "h.out: is not what was saved" in text
    with pytest.raises(UsageError, match=r"'qvk.weight' by names=.*qkv.weight"):
        run(tmp_path / "right", "--against", tmp_path / "trained", "--name=h.q.*=qvk.*")
    for wrong in (
        ["--part"],
        [tmp_path / "right", "--against", tmp_path],
        ["--name=a", *asked[:2]],
    ):
        with pytest.raises(Exception, match=r"--against|HERE=TRAINED"):
            run(tmp_path / "right", *wrong)


MISTAKES = {
    "": "verified: 21 tensors against the digests of step 1",
    "overtaken": "parameter: every parameter is not what was saved",
    "moments exchanged": "exp_avg of every parameter holds the exp_avg_sq of the same",
    "of another": "exp_avg of 0.bias and 1 more holds that of another: of 1.bias",
    "rounded": "exp_avg of every parameter was rounded to bf16",
    "optimizer lost": "exp_avg of every parameter was saved, and is missing",
    "a moment lost": "exp_avg_sq of 0.bias was saved, and is missing",
    "steps lost": "the step count of 0.weight is 0, and 1 was saved",
    "zeroed": "parameter: 3.weight is 0",
    "of one rank": "parameter: 3.weight is what was saved in part only: elements in [0, ",
    "decayed again": "parameter: every parameter is not what was saved",
    "a statistic lost": "buffer of 1.running_mean is 0",
    "a weight lost": "parameter: 3.bias was saved, and is missing",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("writer", ["shards", "whole", "parts", "later"])
def test_a_checkpoint_is_compared_with_its_record(
    ask: Ask, tmp_path: Path, writer: str, mistake: str
) -> None:
    """The record is of the call: a save that goes on while training changes the state differs."""
    folder = tmp_path / f"saved{'.pt' * (writer == 'whole')}"
    answer = ask("written", writer=writer, folder=str(folder), mistake=mistake)[0]
    assert answer["files"] == ["zerocheck-next.json", "zerocheck.json"]
    code, text = run(folder)
    assert code == bool(mistake) and MISTAKES[mistake] in text, text


class Adapted(nn.Module):
    """A frozen weight with an adapter of low rank, named as PEFT names it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})


def recorded(model: nn.Module, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups)
    for one in model.parameters():
        one.grad = torch.randn_like(one) if one.requires_grad else None
    optimizer.step()
    return optimizer


def test_numbered_moments_are_compared_by_the_names_of_the_record(tmp_path: Path) -> None:
    """Files without names of parameters: two groups, weights of one shape, as a Trainer has."""
    path, model = tmp_path / "trained.pt", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = [one for one in model.parameters() if one.ndim > 1]
    biases = [one for one in model.parameters() if one.ndim == 1]
    optimizer = recorded(model, [{"params": weights}, {"params": biases, "weight_decay": 0.0}])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    zerocheck.attach(model, optimizer).saved(path)
    code, text = run(path)
    assert code == 0 and "verified: 12 tensors against the digests of step 0" in text, text
    moments = state["optimizer"]["state"]
    moments[0]["exp_avg"], moments[1]["exp_avg"] = moments[1]["exp_avg"], moments[0]["exp_avg"]
    torch.save(state, path)
    code, text = run(path)
    assert code == 1, text
    assert "exp_avg of 0.weight and 1 more holds that of another: of 1.weight" in text, text


def test_an_adapter_is_compared_without_its_name_and_base(tmp_path: Path) -> None:
    model = Adapted()
    optimizer = recorded(
        model, [{"params": [one for one in model.parameters() if one.requires_grad]}]
    )
    weights = {
        name.replace(".default", ""): one
        for name, one in model.state_dict().items()
        if name.startswith("lora")
    }
    path, state = tmp_path / "adapter.pt", {"model": weights, "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    zerocheck.attach(model, optimizer).saved(path)
    code, text = run(path)
    assert code == 0 and "verified: 6 tensors against the digests of step 0" in text, text
    assert "note: an adapter: 2 parameters that training recorded are not in it" in text
    with torch.no_grad():
        weights["lora_B.weight"][3] *= 2
    torch.save(state, path)
    code, text = run(path)
    assert code == 1 and "lora_B.weight is what was saved in part only" in text, text
    del weights["lora_B.weight"]
    torch.save(state, path)
    assert "parameter: lora_B.weight was saved, and is missing" in run(path)[1]
