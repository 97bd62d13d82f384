"""Weights of another process: equal to what was trained, or what differs is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zerocheck
from zerocheck.errors import UsageError


class Trained(nn.Module):
    """Attention with three projections, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v")}) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


NAMES = {
    "model.layers.*.qkv.*": ["layers.*.q.*", "layers.*.k.*", "layers.*.v.*"],
    "model.norm.*": "norm.*",
    "model.embedding.weight": "embedding.weight",
}


def record(model: nn.Module, folder: Path) -> None:
    check = zerocheck.attach(model, torch.optim.AdamW(model.parameters()))
    check.published(folder)


def engine(model: Trained, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Whole tensors of an engine: fused, renamed, in its own dtype."""
    own = {f"model.norm.{name}": one for name, one in model.norm.state_dict().items()}
    for number, layer in enumerate(model.layers):
        for part in ("weight", "bias"):
            fused = torch.cat([getattr(layer[name], part) for name in ("q", "k", "v")])
            own[f"model.layers.{number}.qkv.{part}"] = fused
    own["model.embedding.weight"] = model.embedding.weight.detach().clone()
    return {
        name: one.detach().clone().to(dtype if one.is_floating_point() else one.dtype)
        for name, one in own.items()
    }


def test_right_weights_have_no_difference(tmp_path: Path) -> None:
    model = Trained()
    record(model, tmp_path / "step-1")
    assert zerocheck.compare_weights(model, tmp_path / "step-1") == ()
    for dtype in (torch.float32, torch.bfloat16):
        weights = engine(model, dtype)
        if dtype is torch.bfloat16:  # buffers stay in fp32
            weights |= {n: o for n, o in engine(model).items() if "running" in n}
        assert zerocheck.compare_weights(weights, tmp_path / "step-1", names=NAMES) == ()


def test_what_differs_is_named(tmp_path: Path) -> None:
    model = Trained()
    record(model, tmp_path / "step-1")

    def found(**changes: torch.Tensor | None) -> str:
        weights = engine(model)
        for name, one in changes.items():
            full = next(full for full in weights if full.endswith(name.replace("__", ".")))
            if one is None:
                del weights[full]
            else:
                weights[full] = one
        return "; ".join(zerocheck.compare_weights(weights, tmp_path / "step-1", names=NAMES))

    good = engine(model)["model.layers.1.qkv.weight"]
    swapped = good.view(3, 8, 8)[[1, 0, 2]].reshape(24, 8)
    text = found(layers__1__qkv__weight=swapped)
    assert "model.layers.1.qkv.weight" in text and "holds that of another" in text
    assert "of layers.1.k.weight" in text
    assert "of layers.1.k.weight, rounded" in found(layers__1__qkv__weight=swapped.bfloat16())
    late = good.clone()
    late[20, 3] += 1
    assert "in part only: layers.1.v.weight, elements in" in found(layers__1__qkv__weight=late)
    assert "has another shape" in found(layers__1__qkv__weight=good[:16])
    assert "is 0" in found(embedding__weight=torch.zeros(11, 8))
    assert "norm.running_mean was saved" not in found(running_mean=None)
    assert "embedding.weight was trained, and is missing here" in found(embedding__weight=None)
    more = {**engine(model), "adapter.weight": torch.ones(2)}
    (text,) = zerocheck.compare_weights(more, tmp_path / "step-1", names=NAMES)
    assert text.startswith("adapter.weight is not in the record of training")


def test_a_version_behind_is_named(tmp_path: Path) -> None:
    model = Trained()
    check = zerocheck.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    check.published(tmp_path / "0")
    old = engine(model)
    with torch.no_grad():
        for one in model.parameters():
            one += 1
    check.taken = 1
    check.published(tmp_path / "1")
    (text,) = zerocheck.compare_weights(old, tmp_path / "1", names=NAMES)
    assert text == "all weights are those of step 0, and step 1 was recorded"


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    model = Trained()
    record(model, tmp_path / "step-1")
    with pytest.raises(UsageError, match=r"'layers.0.qq.weight' by names=.*layers.0.q.weight"):
        zerocheck.compare_weights(
            engine(model), tmp_path / "step-1", names={"model.layers.*.qkv.*": ["layers.*.qq.*"]}
        )
    with pytest.raises(UsageError, match="zerocheck"):
        zerocheck.compare_weights(model, tmp_path)
