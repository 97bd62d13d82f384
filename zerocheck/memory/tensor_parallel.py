"""Tensor parallelism of a simulated model: the layers that are sharded, and a rank's part of them.

Presets and configs are sharded as Shoeybi et al. 2019 ("Megatron-LM", section 3) have it: queries,
keys, values and the first layers of an MLP by their outputs, the layers after them by their inputs,
the embedding by its rows, the head by its outputs, which are gathered. Norms, routers and learned
positions are replicated, and so are activations between the layers (no sequence parallelism).
A user's model says it itself, by the `tp_plan` that models of Hugging Face transformers have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..case.tensor_parallel import DIM, Plan, Style, sharded_dim
from ..errors import UsageError, unknown
from .transformer import Attention, GatedMlp, Transformer, TransformerMlp

STYLES: Mapping[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": "vocabulary",
}
"""Styles of a `tp_plan` that are simulated."""
REPLICATED = "replicated"
"""Begins the names of styles of layers that are not sharded."""

LAYERS: Mapping[type[nn.Module], Mapping[str, Style]] = {
    Attention: {"": "shared", "query": "column", "key": "column", "value": "column", "out": "row"},
    GatedMlp: {"": "shared", "gate": "column", "up": "column", "down": "row"},
    TransformerMlp: {"up": "column", "down": "row"},
    Transformer: {"embedding": "vocabulary", "head": "gathered"},
}
"""Layers of the presets' modules, with their styles; "" is the module itself."""


def plan_for(name: str, model: nn.Module, count: int) -> Plan:
    """Return the layers of a model that are sharded over `count` ranks, by their paths.

    Raises UsageError for a model that does not say which, or that the ranks do not divide.
    """
    if count == 1:
        return {}
    plan = _of_preset(model) if isinstance(model, Transformer) else _of_user(name, model)
    for path in plan:
        _check_divides(name, model, path, plan, count)
    return plan


def shrink(model: nn.Module, plan: Plan, count: int, place: int) -> None:
    """Give a model of the meta device the shapes that one of `count` ranks has of it, in place.

    place: of the rank among those. As `torch.chunk` divides: the first ones have the most rows.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path in plan:
        layer = model.get_submodule(path)
        for name, parameter in [*layer.named_parameters(recurse=False)]:
            dim = sharded_dim(plan, f"{path}.{name}")
            if dim is None:
                continue
            if parameter not in made:
                shape = list(parameter.shape)
                most = -(-shape[dim] // count)
                shape[dim] = max(0, min(most, shape[dim] - most * place))
                local = torch.empty(shape, dtype=parameter.dtype, device="meta")
                made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(layer, name, made[parameter])


def _of_preset(model: nn.Module) -> dict[str, Style]:
    return {
        f"{path}.{layer}".strip("."): style
        for path, module in model.named_modules()
        for layer, style in LAYERS.get(type(module), {}).items()
    }


def _of_user(name: str, model: nn.Module) -> dict[str, Style]:
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


def _matched(name: str, model: nn.Module, said: Mapping[str, str]) -> Iterator[tuple[str, Style]]:
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
        yield path, STYLES[style]


def _check_divides(name: str, model: nn.Module, path: str, plan: Plan, count: int) -> None:
    """Check that ranks have equal parts of a layer; rows of embeddings and heads may differ."""
    if plan[path] == "shared":
        return
    weight = model.get_parameter(f"{path}.weight")
    size = weight.shape[DIM[plan[path]]]
    if plan[path] in ("column", "row") and size % count:
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
