"""Implementation made from the user's own DeepSpeed config: its stage, with all its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ValidationError
from torch import nn

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled
from ...contract import Semantics
from ...errors import UsageError
from ...protocol.layout import Layout
from ..shared.limits import contradiction
from ..shared.simulation import SimulationTraits
from .adapter import DeepSpeed, DeepSpeed0
from .library import Engine
from .options import stored_as
from .releases import CONFIGS_READ, INSTALLED
from .stage3 import DeepSpeed3
from .stage12 import DeepSpeed1, DeepSpeed2
from .user_config import DeepSpeedConfig, read, simulated_sizes

MAPPED = ("adamw", "adam")
"""Optimizers of which accelerate makes DeepSpeedCPUAdam, with the same equations."""

_made: dict[str, type[ConfiguredEngine]] = {}

STAGES: tuple[type[DeepSpeed], ...] = (DeepSpeed0, DeepSpeed1, DeepSpeed2, DeepSpeed3)


def of_file(name: str) -> type[DeepSpeed]:
    """Make the class of a `ds_config.json`.

    Raises UsageError as `user_config.read` does. A value that DeepSpeed's own tables refuse is left
    to DeepSpeed, which then does not start.
    """
    return of_config(read(name))


def of_config(given: DeepSpeedConfig) -> type[DeepSpeed]:
    """Make the class of a config that was read.

    Raises UsageError with a DeepSpeed that reads configs otherwise.
    """
    name = given.name
    if INSTALLED < CONFIGS_READ:
        raise UsageError(
            f"{name} is read as DeepSpeed {CONFIGS_READ} reads it, and {INSTALLED} is installed; "
            f"check its stage instead: zerocheck run deepspeed{given.stage}"
        )
    made = _made.get(name)
    if made is not None and made.given is given:
        return made
    stage = STAGES[given.stage]
    fixed = given.fixed
    attributes = {
        "given": given,
        "fixed": fixed,
        "without": given.without,
        "simulated": _simulated(stage, given),
    }
    _made[name] = type(f"{stage.__name__}DeepSpeedConfig", (ConfiguredEngine, stage), attributes)
    return _made[name]


def _simulated(stage: type[DeepSpeed], given: DeepSpeedConfig) -> SimulationTraits:
    """Return the traits of the stage, with the config's sizes, however large."""
    bucket, options = simulated_sizes(given.large)
    kind = stage.simulated
    summed = given.accumulate_dtype or given.fixed.get("precision", {}).get("reduce")
    return replace(
        kind,
        bucket=bucket or kind.bucket,
        options={**kind.options, **stored_as(options)},
        pinned=given.pinned,
        wide_gradients=summed == "fp32",
        obeys_microbatches=True,
    )


class ConfiguredEngine(DeepSpeed):
    """DeepSpeed engine with the keys of a user's config on top of its stage.

    The engine gets the values of the case as always, which are those that the config fixes, and in
    addition the keys that no case has.
    """

    given: ClassVar[DeepSpeedConfig]

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None. The config may contradict the case."""
        reason = contradiction(cls.given.name, cls.given.fixed, case)
        return reason or super().supports(case) or _limit(cls.given, case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the layout of the stage; None where the engine gets keys unknown to it."""
        given = cls.given
        if given.zero or given.accumulate_dtype or given.bf16:
            return None
        return super().layout(model, case, rank)

    def _means(self, case: Case) -> Semantics:
        semantics = replace(super()._means(case), average=self.given.average)
        if self.given.accumulate_dtype is None or case.precision.compute != "bf16":
            return semantics
        words: Any = {"accumulate_dtype": self.given.accumulate_dtype}
        return replace(semantics, **words)

    def _config(self) -> dict[str, Any]:
        given = self.given
        config = super()._config()
        config.update(given.top)
        if given.average == "sum":
            config["gradient_allreduce_op"] = "sum"
        if given.predivide != 1.0:
            config["gradient_predivide_factor"] = given.predivide
        zero = config["zero_optimization"]
        zero.update(given.zero)
        if not given.optimizer:
            zero.pop("offload_optimizer", None)
        if not given.param:
            zero.pop("offload_param", None)
        config["checkpoint"].update(given.checkpoint)
        if "bf16" in config:
            config["bf16"].update(given.bf16)
            if given.accumulate_dtype is not None:
                config["data_types"]["grad_accum_dtype"] = given.accumulate_dtype
        for key, size in given.batch.items():
            config.pop(key, None)
            if size is not None:
                config[key] = size
        if given.own_kernel and given.adam is None and not given.maps_optimizer:
            config.pop("zero_force_ds_cpu_optimizer", None)
        if given.data_types:
            config["data_types"] = {**config.get("data_types", {}), **given.data_types}
        if given.adam is not None:
            config["optimizer"] = given.adam.config
        return config

    def _engine(self, given: list[dict[str, Any]]) -> Engine:
        """Build the engine; groups leave to it what the config declares of AdamW."""
        named = () if self.given.adam is None else self.given.adam.named
        left = [{key: one for key, one in group.items() if key not in named} for group in given]
        try:
            return super()._engine(left)
        except ValidationError as error:  # the key and the reason are in its further lines
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ValueError(f"{error.title} refuses {key}: {first['msg']}") from error

    def _offloads_states(self) -> bool:
        return self.given.optimizer


def _limit(given: DeepSpeedConfig, case: Case) -> str | None:
    """Return the reason why the engine cannot run, or we cannot judge, this config and case.

    None if there is no reason.
    """
    if case.world_size < given.predivide:
        # What underflows in the division is more than bounds count.
        return (
            f"gradient_predivide_factor {given.predivide:g} is larger than the number of ranks, "
            f"{case.world_size}"
        )
    if given.own_kernel and given.maps_optimizer and case.optimizer.kind not in MAPPED:
        return (
            "accelerate puts DeepSpeedCPUAdam in place of an optimizer whose states are offloaded, "
            f"of {case.optimizer.kind} too"
        )
    idle = (*uncalled(case.model), *sometimes_used(case.model))
    if idle and given.optimizer and not given.zero.get("ignore_unused_parameters", True):
        return (
            f"DeepSpeed stops at a parameter that is not used, {idle[0]}: ignore_unused_parameters "
            f"is false in {given.name}"
        )
    return None
