"""Source of the model, a preset or the user's factory, and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..catalogue import check_factory
from ..errors import UsageError, failing, unknown
from ..models.parts import block_list, model_of
from ..models.user import Parts, parts_in
from ..user_code import import_user_code
from .experts import EVEN_ROUTING, divide_experts
from .huggingface import is_model_config, model_of_config, read_architecture
from .pipeline import cut
from .presets import PRESETS, Architecture
from .samples import MicrobatchSamples, samples_of
from .setup import Setup
from .tensor_parallel import Plan, plan_for, shrink
from .transformer import build

OWN_POLICY = (
    "FSDP in mixed precision: batch norms assumed to have a policy of their own; with that of the "
    "rest a GPU says: Expected running_mean to have type BFloat16 but got Float"
)

CUDNN = (
    "convolutions: workspaces of cuDNN are not modelled; for a ResNet-18 an H200 reserved 1 % more "
    "than is said here in bf16, and 26 % more in fp32"
)


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built on the meta device, with all of its blocks or with fewer.

    name: as the user gave it; shape: that of a preset or config, else None; make: gives the whole
    model, or a tuple of it and its functions.
    """

    name: str
    shape: Architecture | None
    make: Callable[[], Any]

    def build(self, blocks: int | None = None) -> nn.Module:
        """Return the model on the meta device; blocks: with its first blocks only."""
        if self.shape is not None:
            shape = self.shape if blocks is None else self.shape.with_blocks(blocks)
            return build(shape)
        model = model_of(self.name, self._made())
        self._check(model)
        if blocks is not None:
            found = block_list(model)
            assert found is not None
            del found[1][blocks:]
        return model

    def held(self, setup: Setup, blocks: int | None = None) -> nn.Module:
        """Return the model that the counted rank shards: its stage, with its experts.

        blocks: the stage has so many of the model's first blocks.
        """
        model = self.build(blocks)
        if setup.pipeline_parallel > 1:
            cut(setup, model, few=blocks is not None)
        if setup.expert_parallel > 1:
            tokens = setup.batch * setup.sequence
            divide_experts(self.name, model, setup.expert_parallel, tokens)
        return model

    def sharded_layers(self, setup: Setup, model: nn.Module) -> Plan:
        """Return the layers of the model that tensor parallelism shards, by their paths."""
        return plan_for(self.name, model, setup.tensor_parallel, setup.sequence)

    def part(self, setup: Setup) -> nn.Module:
        """Return the model with the shapes that the counted rank computes with."""
        model = self.held(setup)
        plan = self.sharded_layers(setup, model)
        shrink(model, plan, setup.tensor_parallel, (setup.rank or 0) % setup.tensor_parallel)
        return model

    def assumes(self, setup: Setup) -> tuple[str, ...]:
        """Return assumptions about data and the user's policies, and what is not modelled."""
        if self.shape is not None:
            return (EVEN_ROUTING,) if self.shape.experts else ()
        modules = [*self.build().modules()]
        casts = setup.precision == "mixed" and not setup.autocast
        norms = [one for one in modules if isinstance(one, _BatchNorm)]
        own = casts and any(norm.track_running_stats for norm in norms)
        convolves = any(isinstance(one, _ConvNd) for one in modules)
        return (*((OWN_POLICY,) if own else ()), *((CUDNN,) if convolves else ()))

    def samples(self, setup: Setup) -> MicrobatchSamples:
        """Return the samples of a microbatch, with data.

        Those that the factory's batch function draws, else token ids.
        """
        return samples_of(setup, self._parts)

    @cached_property
    def _parts(self) -> Parts | None:
        """Functions that the factory returns with the model, asked for once."""
        made = () if self.shape is not None else self._made()
        has_functions = isinstance(made, tuple) and len(made) > 1
        return parts_in(self.name, made) if has_functions else None

    def _made(self) -> Any:
        with torch.device("meta"), failing(f"{self.name} fails on the meta device"):
            return self.make()

    def _check(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "meta":
                raise UsageError(
                    f"{self.name} puts {name} on {tensor.device}; leave the device to torch, so "
                    "that the model is built without memory"
                )


def source(name: str) -> ModelSource:
    """Return a preset by name, the model of a Hugging Face config.json, or that of a factory.

    A factory is named `package.module:factory` or `path/to/file.py:factory`.
    It takes no arguments and returns the model, which gets token ids, or (model, batch) or
    (model, batch, loss), as `zerocheck run --model` takes it.
    Raises UsageError, with the nearest name, for anything else.
    """
    if name in PRESETS:
        return ModelSource(name, PRESETS[name], lambda: build(PRESETS[name]))
    if is_model_config(name):
        shape = read_architecture(name)
        if shape is None:
            return ModelSource(name, None, lambda: model_of_config(name))
        return ModelSource(name, shape, lambda: build(shape))
    if ":" not in name and not name.endswith(".py"):
        error = unknown("model", name, PRESETS)
        raise UsageError(
            f"{error}; or give the path of a config.json, package.module:factory or "
            "path/to/file.py:factory"
        )
    check_factory(name)
    made: Any = import_user_code(name)
    if not callable(made):
        raise UsageError(
            f"{name} is of type {type(made).__name__}; needed is a function that returns the model"
        )
    return ModelSource(name, None, made)


def alike(blocks: nn.ModuleList) -> str | None:
    """Return None if the blocks differ in their weights alone, else the first difference.

    The same modules with the same parameters (shape, dtype, whether they train) and the same plain
    attributes; a number may count the blocks (`layer_idx`).
    """
    first = _described(blocks[0])
    for index, block in enumerate(blocks):
        other = _described(block)
        for name in {**first, **other}:
            one, its = first.get(name), other.get(name)
            counts = type(one) is int and type(its) is int and its - one == index
            if one != its and not counts:
                return f"block {index} differs from block 0 in {name}"
    return None


def _described(block: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path or "its class"] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | tuple) and not name.startswith("_"):
                found[f"{path}.{name}".lstrip(".")] = value
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return found
