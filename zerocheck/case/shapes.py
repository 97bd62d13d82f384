"""Names and sizes of a case's model, computed without building anything.

A case may ask for more elements than any machine holds, so whoever must know the sizes first (the
checks, the features, the strategies) asks here. Sizes are in elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import translate
from functools import lru_cache

from .schema import Block, Case, Data, Model, ParameterDtype

SPARE = Block(kind="mlp", hidden=4)
"""The block that is never called, if the model has `unused`."""

STEM_KERNEL = 3
"""Kernel size of a stem of kind `conv`."""

SIDE_INPUTS = 3
"""Features of the second input, if the model has `side`."""

MATRIX_KINDS = frozenset(("mlp", "attention", "recurrent", "experts"))
"""Kinds of blocks with matrices, which `transposed` is about."""

ITEMSIZE: dict[ParameterDtype, int] = {"fp32": 4, "bf16": 2}
"""Bytes of an element of a parameter."""

Shape = tuple[int, ...]


@lru_cache(maxsize=256)
def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Return {name: shape}, in the order of `named_parameters()`; a tied head's is `stem.weight`.

    The dict is shared between callers: do not change it.
    """
    if model.user is not None:
        return {one.name: one.shape for one in model.user.parameters}
    return dict(_parameters(model))


def parameter_dtypes(model: Model) -> dict[str, ParameterDtype]:
    """Return {name: dtype}, in the same order as `parameter_shapes`."""
    narrow = tuple(f"blocks.{i}." for i, block in enumerate(model.blocks) if block.dtype == "bf16")
    if model.user is not None:
        return {one.name: one.dtype for one in model.user.parameters}
    return {name: "bf16" if name.startswith(narrow) else "fp32" for name in parameter_shapes(model)}


def parameter_bytes(model: Model) -> dict[str, int]:
    """Return {name: bytes of the whole parameter}, in the same order as `parameter_shapes`."""
    shapes, dtypes = parameter_shapes(model), parameter_dtypes(model)
    return {name: math.prod(shape) * ITEMSIZE[dtypes[name]] for name, shape in shapes.items()}


def parameter_elements(model: Model) -> int:
    """Count the elements of all parameters together."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def call_order(model: Model) -> tuple[int, ...]:
    """Return the index of the block that each call runs."""
    return tuple(range(len(model.blocks))) if model.calls is None else model.calls


def calls_twice(model: Model) -> bool:
    """Return True if the forward calls a block more than once."""
    order = call_order(model)
    return len(set(order)) < len(order)


def called_blocks(model: Model) -> Iterable[Block]:
    """Return the blocks that the forward calls, each once."""
    if model.calls is None:
        return model.blocks
    return [model.blocks[index] for index in dict.fromkeys(model.calls)]


def activation_elements(model: Model, data: Data) -> int:
    """Estimate the largest number of elements that one microbatch holds for its backward.

    0 for the user's own model, which was run already.
    """
    if model.user is not None:
        return 0
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
            case "recurrent":
                total += 8 * positions * model.width
            case "experts":
                total += positions * (2 * block.hidden + 2 * model.width + 2 * block.experts)
            case _:
                pass
        total += 2 * positions * model.width
        total += positions * model.width * (block.gain + block.empty)
    if model.side:
        total += positions * (SIDE_INPUTS + 2 * model.width)
    return total


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match one of the patterns (fnmatch), in their order."""
    patterns = tuple(patterns)
    if not patterns:
        return []
    match = _compiled(patterns)
    return [name for name in names if match(name)]


@lru_cache(maxsize=4096)
def _compiled(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Compile all patterns into one: cases are drawn by the thousand."""
    return re.compile("|".join(map(translate, patterns))).match


@lru_cache(maxsize=256)
def frozen_names(model: Model) -> tuple[str, ...]:
    """Return the names of the parameters that do not require gradients at first."""
    if model.user is not None:
        return tuple(one.name for one in model.user.parameters if not one.trains)
    return tuple(matching(parameter_shapes(model), model.frozen))


@lru_cache(maxsize=256)
def trainable(model: Model) -> tuple[str, ...]:
    """Return the names of the parameters that require gradients."""
    frozen = set(frozen_names(model))
    return tuple(name for name in parameter_shapes(model) if name not in frozen)


def unfrozen(case: Case) -> tuple[str, ...]:
    """Return the names of the parameters that are frozen at first and become trainable later."""
    if case.training.unfreeze is None:
        return ()
    return tuple(matching(parameter_shapes(case.model), case.model.frozen))


def learning(case: Case) -> tuple[str, ...]:
    """Return the names of the parameters that require gradients, from the start or later."""
    return (*trainable(case.model), *unfrozen(case))


def overflowing(model: Model) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient alone can overflow.

    They are trainable from the start, have elements, and every microbatch of every rank uses them.
    Of the user's own model, their module is one that the forward calls.
    """
    idle = (*uncalled(model), *sometimes_used(model))
    none = empties(model)
    names = [n for n in trainable(model) if not n.startswith(idle) and n not in none]
    if model.user is not None:
        called = set(model.user.order)
        names = [name for name in names if name.rpartition(".")[0] in called]
    return tuple(names)


def leaves_a_rank_empty(rows: int, world_size: int) -> bool:
    """Return True if some rank gets none of `rows` rows that are split like torch.chunk.

    The last ranks get less: 4 rows on 3 ranks are 2 + 2, and the third has none.
    """
    most = -(-rows // world_size)
    return most * (world_size - 1) >= rows


def uncalled(model: Model) -> tuple[str, ...]:
    """Return prefixes of the parameters that no forward uses."""
    if model.user is not None:
        return tuple(one.name for one in model.user.parameters if one.used == "never")
    called = set(call_order(model))
    idle = [f"blocks.{index}." for index in range(len(model.blocks)) if index not in called]
    return (*idle, "spare.") if model.unused else tuple(idle)


def sometimes_used(model: Model) -> tuple[str, ...]:
    """Return prefixes of the parameters that forwards of only some ranks may use."""
    if model.user is not None:
        return tuple(one.name for one in model.user.parameters if one.used == "sometimes")
    prefixes = [
        f"blocks.{index}.experts.mlps."
        for index in sorted(set(call_order(model)))
        if model.blocks[index].kind == "experts" and model.blocks[index].experts > 1
    ]
    return (*prefixes, "side.") if model.side else tuple(prefixes)


def scalars(model: Model) -> tuple[str, ...]:
    """Return the names of the 0-d parameters."""
    return tuple(name for name, shape in parameter_shapes(model).items() if not shape)


def empties(model: Model) -> tuple[str, ...]:
    """Return the names of the parameters without elements."""
    return tuple(name for name, shape in parameter_shapes(model).items() if 0 in shape)


def transposed(model: Model) -> tuple[str, ...]:
    """Return the names of the parameters that are not contiguous: stored as the transposed matrix.

    A matrix with a dim of size 1 is contiguous either way. Of the user's own model, any parameter
    that is not contiguous.
    """
    if model.user is not None:
        return tuple(one.name for one in model.user.parameters if not one.contiguous)
    asked = tuple(f"blocks.{i}." for i, block in enumerate(model.blocks) if block.transposed)
    return tuple(
        name
        for name, shape in parameter_shapes(model).items()
        if len(shape) == 2 and min(shape) > 1 and name.startswith(asked)
    )


def draws_random(model: Model) -> bool:
    """Return True if forwards draw random numbers."""
    if model.user is not None:
        return "dropout" in model.user.features
    return any(block.dropout > 0 for block in model.blocks)


def graph_differs(model: Model) -> bool:
    """Return True if activations between layers need a gradient on some ranks only.

    The backward then runs through other layers on each rank. This takes a frozen stem (or
    everything before a block of experts frozen), so that only parameters that are used sometimes
    ask for the gradient. Not known for the user's own model: there it shows when the ranks hang.
    """
    if model.user is not None:
        return False
    learning = set(trainable(model))

    def some(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in learning)

    needed = some("stem.")
    if model.side and some("side.") and not needed:
        return True
    for index in call_order(model):
        block = model.blocks[index]
        name = f"blocks.{index}"
        if block.kind == "experts" and not needed:
            router = {f"{name}.experts.weight", f"{name}.experts.bias"} & learning
            each = {some(f"{name}.experts.mlps.{number}.") for number in range(block.experts)}
            if not router and len(each) > 1:
                return True
        needed = needed or some(f"{name}.")
    return False


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
    if model.side:
        yield "side.weight", (width, SIDE_INPUTS)
        yield "side.bias", (width,)
    for index, block in enumerate(model.blocks):
        yield from _block(f"blocks.{index}", block, width)
    if not model.tied:
        yield "head.weight", (model.outputs, width)
    if model.head_bias:
        yield "head.bias", (model.outputs,)
    if model.unused:
        yield from _block("spare", SPARE, width)


def _block(name: str, block: Block, width: int) -> Iterator[tuple[str, Shape]]:
    if block.gain:
        yield f"{name}.gain", ()
    match block.kind:
        case "mlp":
            yield from _mlp(name, block, width)
        case "attention":
            yield from _layer(f"{name}.qkv", (3 * width, width), bias=block.bias)
            yield from _layer(f"{name}.out", (width, width), bias=block.bias)
        case "conv":
            yield from _layer(f"{name}.conv", (width, width, block.kernel), bias=block.bias)
        case "recurrent":
            yield f"{name}.gru.weight_ih_l0", (3 * width, width)
            yield f"{name}.gru.weight_hh_l0", (3 * width, width)
            if block.bias:
                yield f"{name}.gru.bias_ih_l0", (3 * width,)
                yield f"{name}.gru.bias_hh_l0", (3 * width,)
        case "experts":
            yield from _layer(f"{name}.experts", (block.experts, width), bias=block.bias)
            for number in range(block.experts):
                yield from _mlp(f"{name}.experts.mlps.{number}", block, width)
        case _:
            bias = block.bias and block.kind != "rms_norm"
            yield from _layer(f"{name}.norm", (width,), bias=bias)
    if block.empty:
        yield f"{name}.narrow.weight", (0, width)
        yield f"{name}.widen.weight", (width, 0)


def _mlp(name: str, block: Block, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _layer(f"{name}.up", (block.hidden, width), bias=block.bias)
    yield from _layer(f"{name}.down", (width, block.hidden), bias=block.bias)


def _layer(name: str, shape: Shape, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
