"""Implementation made from a strategy object of the user's own, in Lightning's Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import nn

from ...case.schema import Case
from ...contract.implementation import Implementation
from ...errors import UsageError
from .implementation import class_of
from .user_config import LightningConfig
from .user_config import strategy as asked

_ADVICE = {
    ModelParallelStrategy: asked.OTHERS["ModelParallelStrategy"],
    SingleDeviceStrategy: asked.OTHERS["SingleDeviceStrategy"],
    DeepSpeedStrategy: "give its config to DeepSpeed: zerocheck run ds_config.json",
}


def of_object(name: str, given: Strategy | Callable[[], Strategy]) -> type[Implementation]:
    """Make the class of a strategy, of its class, or of a function that returns one.

    Each case has a strategy of its own: a copy, or what the function returns. Raises UsageError for
    one that is not checked.
    """
    make = given if callable(given) else lambda: copy.deepcopy(given)
    try:
        made: object = make()
    except Exception as error:
        raise UsageError(f"{name} makes no strategy: {type(error).__name__}: {error}") from error
    if not isinstance(made, Strategy):
        raise UsageError(
            f"{name} is a {type(made).__module__}.{type(made).__name__}; needed is a strategy of "
            "lightning.pytorch"
        )
    for kind, why in _ADVICE.items():
        if isinstance(made, kind):
            raise UsageError(
                f"{name} is a {type(made).__name__}, which zerocheck does not check: {why}"
            )

    def strategy(self: Implementation, model: nn.Module, case: Case) -> Strategy:
        return make()

    return class_of(_config_of(name, made), strategy=strategy)


def _config_of(name: str, made: Strategy) -> LightningConfig:
    """Return the config that a strategy stands for, with the Trainer's default precision."""
    fixed: dict[str, Any] = {"training": {"norm": "2"}}
    if not isinstance(made, FSDPStrategy):
        kind: asked.Kind = "ddp" if isinstance(made, DDPStrategy) else "auto"
        return LightningConfig(name=name, fixed=fixed, strategy=asked.Strategy(kind=kind, name=""))
    flat = not made.kwargs["use_orig_params"]
    fixed["training"]["clip"] = None  # Lightning clips no norm of FSDP
    fixed["sharding"] = {"wrap": "whole", "use_orig_params": not flat, "offload": "none"}
    checkpoints = bool(made._activation_checkpointing_kwargs)
    fsdp = asked.FsdpArguments(
        sharding=made.sharding_strategy.name,
        checkpointing=asked.Policy("block" if checkpoints else "whole"),
        flat=flat,
        full=made._state_dict_type == "full",
    )
    strategy = asked.Strategy(kind="fsdp", name="", fsdp=fsdp)
    return LightningConfig(name=name, fixed=fixed, strategy=strategy)
