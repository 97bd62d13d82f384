"""What `attach` refuses before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decaying import parts
from torch import nn

import zerocheck


def refused(**given: Any) -> str:
    model, optimizer = parts()
    model, optimizer = given.pop("model", model), given.pop("optimizer", optimizer)
    with pytest.raises(zerocheck.UsageError) as error:
        zerocheck.attach(model, optimizer, **given)
    return str(error.value)


@pytest.mark.parametrize(
    ("stage", "narrow", "half", "message"),
    [
        (1, False, False, "a NoneType"),
        (3, True, True, "fp16"),
        (0, True, False, "bf16 at stage 0"),
        (0, False, False, ""),
    ],
)
def test_engines_of_deepspeed(
    stage: int, narrow: bool, half: bool, message: str, tmp_path: Path
) -> None:
    """It is refused before it is looked at; stage 0 in fp32 is like any other model."""

    class Engine(nn.Sequential):
        optimizer = None

        def zero_optimization_stage(self) -> int:
            return stage

        def bfloat16_enabled(self) -> bool:
            return narrow

        def fp16_enabled(self) -> bool:
            return half

    engine = Engine(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(engine.parameters())
    if message:
        text = refused(model=engine, optimizer=optimizer)
        assert f"does not check DeepSpeed with {message}" in text and "ds_config.json" in text
    else:
        zerocheck.attach(engine, optimizer, directory=tmp_path)


def test_what_is_refused() -> None:
    assert "did you mean 'warn'?" in refused(on_violation="warning")
    assert "every is 0 (allowed: an int from 1 on, or None)" in refused(every=0)
    assert "steps holds 0 (allowed: ints from 1 on)" in refused(steps=(0, 1))
    given = refused(optimizer=parts(torch.optim.NAdam)[1])
    assert "attach judges AdamW, SGD, Adam, Adagrad and RMSprop, got NAdam" in given
    other = type("AdamW", (torch.optim.NAdam,), {"__module__": "fused.optim"})
    assert "got fused.optim.AdamW (allowed: torch" in refused(optimizer=parts(other)[1])
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    given = refused(optimizer=torch.optim.Muon([matrix]))
    assert "attach judges AdamW, SGD, Adam, Adagrad and RMSprop, got Muon" in given
    dampened = parts(torch.optim.SGD, momentum=0.9, dampening=0.5)[1]
    assert "this SGD has a dampening of 0.5 (allowed" in refused(optimizer=dampened)
    assert "needs a torch optimizer, got int" in refused(optimizer=3)
    centered = parts(torch.optim.RMSprop, centered=True)[1]
    assert "parameter group 0 of this RMSprop is centered" in refused(optimizer=centered)
    slower = parts(torch.optim.Adagrad, lr_decay=0.5)[1]
    assert "this Adagrad has an lr_decay of 0.5" in refused(optimizer=slower)
    first, second = parts(torch.optim.Adam)[0].parameters(), parts(torch.optim.Adam)[0].parameters()
    decoupled = {"params": second, "weight_decay": 0.1, "decoupled_weight_decay": True}
    mixed = torch.optim.Adam([{"params": first, "weight_decay": 0.1}, decoupled])
    assert "parameter group 1 of this Adam applies its weight decay of 0.1 apart" in refused(
        optimizer=mixed
    )
    assert "none of the 4 parameters of the DecaysTwice is one of the model" in refused(
        model=nn.Linear(2, 2)
    )
    wide = nn.Linear(2, 2).double()
    optimizer = torch.optim.AdamW(wide.parameters())
    assert "weight is torch.float64" in refused(model=wide, optimizer=optimizer)
