"""Names and sizes of a case's model, computed without building anything.

A case may ask for more elements than any machine holds, so whoever must know the sizes first (the
checks, the features, the strategies) asks here. Sizes are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from .schema import Block, Data, Model

SPARE = Block(kind="mlp", hidden=4)
"""The block that is never called, if the model has `unused`."""

STEM_KERNEL = 3
"""Kernel size of a stem of kind `conv`."""

Shape = tuple[int, ...]


@lru_cache(maxsize=256)
def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Name -> shape, in the order of `named_parameters()`; a tied head's weight is `stem.weight`.

    The dict is shared between callers: do not change it.
    """
    return dict(_parameters(model))


def parameter_elements(model: Model) -> int:
    """Elements of all parameters together."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def call_order(model: Model) -> tuple[int, ...]:
    """Index of the block that each call runs."""
    return tuple(range(len(model.blocks))) if model.calls is None else model.calls


def activation_elements(model: Model, data: Data) -> int:
    """Elements that one microbatch holds at most between forward and backward, roughly."""
    positions = data.batch * data.length
    total = positions * (model.inputs if model.stem != "embedding" else 1)
    total += positions * (model.width + model.outputs)
    for index in call_order(model):
        block = model.blocks[index]
        match block.kind:
            case "mlp":
                total += 2 * positions * block.hidden
            case "attention":
                total += 3 * positions * model.width + 2 * positions * block.heads * data.length
            case _:
                pass
        total += 2 * positions * model.width
    return total


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match one of the patterns (fnmatch), in their order."""
    patterns = tuple(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def trainable(model: Model) -> list[str]:
    """Names of the parameters that require gradients."""
    frozen = set(matching(parameter_shapes(model), model.frozen))
    return [name for name in parameter_shapes(model) if name not in frozen]


def uncalled(model: Model) -> tuple[str, ...]:
    """Prefixes of the parameters that no forward uses."""
    called = set(call_order(model))
    idle = [f"blocks.{index}." for index in range(len(model.blocks)) if index not in called]
    return (*idle, "spare.") if model.unused else tuple(idle)


def _parameters(model: Model) -> Iterator[tuple[str, Shape]]:
    width = model.width
    match model.stem:
        case "dense":
            yield "stem.weight", (width, model.inputs)
        case "conv":
            yield "stem.weight", (width, model.inputs, STEM_KERNEL)
        case "embedding":
            yield "stem.weight", (model.inputs, width)
    if model.stem != "embedding":
        yield "stem.bias", (width,)
    for index, block in enumerate(model.blocks):
        yield from _block(f"blocks.{index}", block, width)
    if not model.tied:
        yield "head.weight", (model.outputs, width)
    if model.head_bias:
        yield "head.bias", (model.outputs,)
    if model.unused:
        yield from _block("spare", SPARE, width)


def _block(name: str, block: Block, width: int) -> Iterator[tuple[str, Shape]]:
    layers: tuple[tuple[str, Shape], ...]
    match block.kind:
        case "mlp":
            layers = (("up", (block.hidden, width)), ("down", (width, block.hidden)))
        case "attention":
            layers = (("qkv", (3 * width, width)), ("out", (width, width)))
        case "conv":
            layers = (("conv", (width, width, block.kernel)),)
        case _:
            layers = (("norm", (width,)),)
    for layer, shape in layers:
        yield f"{name}.{layer}.weight", shape
        if block.bias and block.kind != "rms_norm":
            yield f"{name}.{layer}.bias", shape[:1]
