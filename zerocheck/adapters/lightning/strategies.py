"""Strategies of a config as Lightning takes them: names, or objects with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from ...case.schema import Case
from ...errors import UsageError
from ..shared.units import block_classes
from .user_config import LightningConfig
from .user_config.strategy import FsdpArguments, Policy


def strategy_for(given: LightningConfig, model: nn.Module, case: Case) -> str | Strategy:
    """Return what the Trainer is given as its strategy: the name, or the object."""
    asked = given.strategy
    if asked.name:
        return asked.name
    if asked.fsdp is None:
        return DDPStrategy(**asked.passed)
    return FSDPStrategy(**asked.passed, **_arguments(asked.fsdp, model, case))


def _arguments(fsdp: FsdpArguments, model: nn.Module, case: Case) -> dict[str, Any]:
    """Return arguments of FSDPStrategy: no config knows the classes of a drawn model."""
    arguments: dict[str, Any] = {
        "sharding_strategy": fsdp.sharding,
        "use_orig_params": not fsdp.flat,
        "state_dict_type": "full" if fsdp.full else "sharded",
        "auto_wrap_policy": _policy(fsdp.units, model, case),
        "activation_checkpointing_policy": _policy(fsdp.checkpointing, model, case),
    }
    if fsdp.prefetch is not None:
        arguments["backward_prefetch"] = BackwardPrefetch[fsdp.prefetch]
    return arguments


def _policy(
    policy: Policy, model: nn.Module, case: Case
) -> set[type[nn.Module]] | Callable[..., bool] | None:
    drawn = case.model.user is None
    if policy.kind == "whole":
        return None
    if policy.kind == "size":
        if drawn:
            return partial(size_based_auto_wrap_policy, min_num_params=case.sharding.bucket)
        return size_based_auto_wrap_policy
    return block_classes(model) if drawn else {_imported(one) for one in policy.classes}


def _imported(path: str) -> type[nn.Module]:
    """Import a class, as LightningCLI does."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} of the config does not import: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UsageError(f"{path} of the config is no class of modules")
    return found
