"""Tensor parallelism of a simulated model: the layers that are sharded, and a rank's part of them.

Presets and configs are sharded as torchtitan does it. Queries, keys, values and the first layers of
an MLP are sharded by their outputs, the layers after them by their inputs, the embedding by its
rows, the head by its outputs (Shoeybi et al. 2019, "Megatron-LM", section 3). Between these layers
each rank has some of the positions (sequence parallelism: Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2), and logits stay sharded in the
loss (`loss_parallel`). Routers see all positions.

A user's model says it itself, by the `tp_plan` that models of Hugging Face transformers have.
Activations between its layers are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ..errors import UsageError, unknown
from .experts import MixtureOfExperts
from .transformer import Attention, GatedMlp, Transformer, TransformerMlp

POSITIONS = Shard(1)
"""Placement of activations between layers: (batch, sequence, width)."""


class ShardedLayer(NamedTuple):
    """Style of a layer; dim of its weight that is sharded, None for none.

    A bias is sharded with dim 0, and replicated with dim 1.
    """

    dim: int | None
    style: ParallelStyle

    def dim_of(self, name: str) -> int | None:
        """Return the sharded dim of the layer's parameter of this name, or None."""
        return self.dim if name == "weight" or self.dim == 0 else None


Plan = Mapping[str, ShardedLayer]
"""Layers by their paths."""
Make = Callable[[], ShardedLayer]


def _gathers_output() -> ShardedLayer:
    return ShardedLayer(0, ColwiseParallel(output_layouts=Replicate()))


STYLES: Mapping[str, Make] = {
    "colwise": lambda: ShardedLayer(0, ColwiseParallel()),
    "rowwise": lambda: ShardedLayer(1, RowwiseParallel()),
    "colwise_rep": _gathers_output,
    "colwise_gather_output": _gathers_output,
    "embedding_rowwise": lambda: ShardedLayer(0, RowwiseParallel(input_layouts=Replicate())),
}
"""Styles of a `tp_plan` that are simulated."""
REPLICATED = "replicated"
"""Begins the names of styles of layers that are not sharded."""


def _gathered(given: Placement = POSITIONS) -> ShardedLayer:
    """Return the style of a module whose layers have one input: its gradient is added up once."""
    style = PrepareModuleInput(input_layouts=given, desired_input_layouts=Replicate())
    return ShardedLayer(None, style)


def _routed() -> ShardedLayer:
    return ShardedLayer(
        None,
        PrepareModuleInputOutput(
            input_layouts=POSITIONS,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=POSITIONS,
        ),
    )


def _to_positions() -> ShardedLayer:
    return ShardedLayer(1, RowwiseParallel(output_layouts=POSITIONS))


def _norm() -> ShardedLayer:
    return ShardedLayer(None, SequenceParallel())


COLUMN, ROW = STYLES["colwise"], STYLES["rowwise"]
LAYERS: Mapping[type[nn.Module], Mapping[str, Make]] = {
    Attention: {
        "": _gathered, "query": COLUMN, "key": COLUMN, "value": COLUMN, "out": _to_positions
    },
    GatedMlp: {"": _gathered, "gate": COLUMN, "up": COLUMN, "down": _to_positions},
    TransformerMlp: {"": _gathered, "up": COLUMN, "down": _to_positions},
    MixtureOfExperts: {"": _routed},
    nn.RMSNorm: {"": _norm},
    nn.LayerNorm: {"": _norm},
    Transformer: {
        "embedding": lambda: ShardedLayer(
            0, RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS)
        ),
        "positions": lambda: ShardedLayer(
            None, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        ),
        "head": lambda: ShardedLayer(
            0,
            ColwiseParallel(
                input_layouts=POSITIONS, output_layouts=Shard(-1), use_local_output=False
            ),
        ),
    },
}  # fmt: skip
"""Layers of the presets' modules; "" is the module itself."""
EXPERT: Mapping[str, Make] = {
    "": lambda: _gathered(Replicate()),
    "gate": COLUMN,
    "up": COLUMN,
    "down": ROW,
}
"""Layers of an expert, which has all positions of its tokens."""


def plan_for(name: str, model: nn.Module, count: int, sequence: int) -> Plan:
    """Return the layers of a model that are sharded over `count` ranks, by their paths.

    sequence: positions of a sample. Raises UsageError for a model that does not say which, or that
    the ranks do not divide.
    """
    if count == 1:
        return {}
    if not isinstance(model, Transformer):
        plan = _of_user(name, model)
    elif sequence % count:
        raise UsageError(
            f"--tensor-parallel {count}: --sequence {sequence} is no multiple of it, and each rank "
            "has some of the positions"
        )
    else:
        plan = dict(_of_preset(model))
    for path, layer in plan.items():
        _check_divides(name, model, path, layer, count)
    return plan


def shrink(model: nn.Module, plan: Plan, count: int, place: int) -> None:
    """Give a model of the meta device the shapes that one of `count` ranks has of it, in place.

    place: of the rank among those. As `torch.chunk` divides: the first ones have the most rows.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, sharded in plan.items():
        layer = model.get_submodule(path)
        for name, parameter in [*layer.named_parameters(recurse=False)]:
            dim = sharded.dim_of(name)
            if dim is None:
                continue
            if parameter not in made:
                shape = list(parameter.shape)
                most = -(-shape[dim] // count)
                shape[dim] = max(0, min(most, shape[dim] - most * place))
                local = torch.empty(shape, dtype=parameter.dtype, device="meta")
                made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(layer, name, made[parameter])


def _of_preset(model: Transformer) -> Iterator[tuple[str, ShardedLayer]]:
    for path, module in model.named_modules():
        expert = ".experts." in f".{path}"
        layers = EXPERT if expert else LAYERS.get(type(module), {})
        for layer, make in layers.items() if not expert or isinstance(module, GatedMlp) else ():
            if getattr(module, layer, module) is not None:
                yield f"{path}.{layer}".strip("."), make()


def _of_user(name: str, model: nn.Module) -> dict[str, ShardedLayer]:
    said = getattr(model, "tp_plan", None)
    if not isinstance(said, Mapping) or not said:
        raise UsageError(
            f"--tensor-parallel: {name} does not say which layers to shard; give the model an "
            'attribute tp_plan: {"layers.*.attention.query": "colwise", ...}, with '
            f"{', '.join(STYLES)}"
        )
    plan = dict(_matched(name, model, said))
    if not plan:
        raise UsageError(
            f"--tensor-parallel: no layer of {name} is named by its tp_plan: {', '.join(said)}"
        )
    return plan


def _matched(
    name: str, model: nn.Module, said: Mapping[str, str]
) -> Iterator[tuple[str, ShardedLayer]]:
    for path, module in model.named_modules():
        pattern = next((one for one in said if fnmatchcase(path, one)), None)
        if pattern is None or str(said[pattern]).startswith(REPLICATED):
            continue
        style = said[pattern]
        if style not in STYLES:
            raise UsageError(f"{name}: {unknown('style', str(style), STYLES)} (of {pattern})")
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise UsageError(
                f"{name}: {path} is a {type(module).__name__}; layers that can be sharded are "
                "Linear and Embedding"
            )
        yield path, STYLES[style]()


def _check_divides(name: str, model: nn.Module, path: str, layer: ShardedLayer, count: int) -> None:
    """Check that ranks have equal parts of a layer; rows of embeddings and heads may differ."""
    if layer.dim is None:
        return
    size = model.get_parameter(f"{path}.weight").shape[layer.dim]
    style = layer.style
    if isinstance(style, ColwiseParallel):
        between = style.use_local_output and style.output_layouts == (Shard(-1),)
    else:
        between = layer.dim == 1
    if between and size % count:
        raise UsageError(
            f"--tensor-parallel {count}: {path} of {name} has {size} features to shard, no "
            f"multiple of {count}"
        )
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, Attention) and parent.narrow_heads % count:
        raise UsageError(
            f"--tensor-parallel {count}: {name} has {parent.narrow_heads} key-value heads, no "
            f"multiple of {count}"
        )
    if size < count:
        raise UsageError(f"--tensor-parallel {count}: {path} of {name} has {size} rows only")
