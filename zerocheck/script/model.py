"""Text of a case's model: the blocks and options that occur in it, and no others.

Parameters have the names of `models/network.py`, which patterns of groups and the paths of sharding
units go by. Layers that follow each other are an nn.Sequential; a class is made only for what does
more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..adapters.shared.script_text import attribute
from ..case.schema import Block, Case
from ..case.shapes import SIDE_INPUTS, SPARE, STEM_KERNEL, call_order, matching, parameter_shapes
from .source import WIDTH, words


@dataclass
class Class:
    """Class of modules: its base, and the lines of `__init__` and `forward` without indent."""

    name: str
    base: str
    forward: list[str]
    arguments: str = "x"
    fields: list[str] = field(default_factory=list)
    given: str = ""
    """Arguments of `__init__`, and of the base's."""


@dataclass
class ModelText:
    """Text of a model. classes: those that the model needs; build: lines that make `model`."""

    classes: list[Class]
    build: list[str]


def model_text(case: Case, *, listed: bool = False) -> ModelText:
    """Return the text of the case's model. listed: it has `blocks` even where there is none."""
    model = case.model
    classes: dict[str, Class] = {}
    layers = {"stem": _stem(case, classes)}
    if model.side:
        layers["side"] = f"nn.Linear({SIDE_INPUTS}, {model.width})"
    blocks = [_block(block, model.width, classes) for block in model.blocks]
    build = []
    if len(blocks) == 1 and len(blocks[0]) > 20:
        build.append(f"block = {blocks[0]}")
        blocks = ["block"]
    order = call_order(model)
    straight = order == tuple(range(len(blocks))) and not model.side and not model.unused
    if blocks or listed or not straight:
        kind = "nn.Sequential(" if straight else "nn.ModuleList(["
        layers["blocks"] = f"{kind}{', '.join(blocks)}{')' if straight else '])'}"
    bias = "" if model.head_bias else ", bias=False"
    layers["head"] = f"nn.Linear({model.width}, {model.outputs}{bias})"
    if model.unused:
        layers["spare"] = _block(SPARE, model.width, classes)
    given = [f"{name}={text}" for name, text in layers.items()]
    if straight:
        whole = f"model = nn.Sequential(OrderedDict({', '.join(given)}))"
        if len(whole) <= WIDTH - 4:
            build.append(whole)
        else:
            parts = [f'"{name}": {text}' for name, text in layers.items()]
            build.append(f"parts = {{{', '.join(parts)}}}")
            build.append("model = nn.Sequential(OrderedDict(parts))")
    else:
        classes["Model"] = _network(case, order)
        build += ["model = Model()"]
        build += [f"model.{name} = {text}" for name, text in layers.items()]
    if model.tied:
        build.append("model.head.weight = model.stem.weight")
    for index, block in enumerate(model.blocks):
        if block.kind in ("group_norm", "batch_norm") and not block.bias:
            build.append(f'model.blocks[{index}].norm.register_parameter("bias", None)')
        if block.transposed:
            build += [
                f"for parameter in model.blocks[{index}].parameters():",
                "    if parameter.dim() == 2:  # is stored transposed, as one tied by .t() is",
                "        parameter.data = parameter.data.t().contiguous().t()",
            ]
    if any(block.kind.endswith("norm") or block.gain for block in model.blocks):
        build += [
            "for parameter in model.parameters():",
            "    nn.init.uniform_(parameter, -0.5, 0.5)  # zeros would hide faults",
        ]
    build += _set(case, case.start.zeros, "nn.init.zeros_({})")
    build += _set(case, case.model.frozen, "{}.requires_grad_(False)")
    first, last = build[-1].partition(" = ")[::2]
    build[-1:] = [f"return {last}"] if first == "model" else [build[-1], "return model"]
    return ModelText(list(classes.values()), build)


def samples(case: Case) -> list[str]:
    """Return lines that draw inputs and target of one microbatch and return its mean loss."""
    model, data = case.model, case.data
    shape = f"{data.batch}, {data.length}"
    factor = "" if data.loss_factor == 1.0 else f" * {data.loss_factor!r}"
    lines = []
    if model.stem == "embedding":
        lines.append(f"x = torch.randint({model.inputs}, ({shape}))")
        lines.append(f"target = torch.randint({model.outputs}, ({shape}))")
    else:
        x, target = (f"torch.randn({shape}, {size})" for size in (model.inputs, model.outputs))
        if not model.side:
            return [f"return F.mse_loss(model({x}), {target}){factor}"]
        lines.append(f"x, target = {x}, {target}")
    if data.masked:
        lines.append(f"target[torch.rand({shape}) < 0.5] = -100  # other numbers of tokens count")
    called = "model(x)"
    if model.side:
        lines.append(
            f"side = torch.randn({shape}, {SIDE_INPUTS}) if torch.rand(()) < 0.5 else None"
        )
        called = "model(x, side)"
    if model.stem != "embedding":
        return [*lines, f"return F.mse_loss({called}, target){factor}"]
    outputs = f"{called}.flatten(0, 1), target.flatten()"
    if not data.masked:
        return [*lines, f"return F.cross_entropy({outputs}){factor}"]
    # A constant in place of the mean number of tokens: the loss stays a sum over tokens.
    share = data.loss_factor / (data.batch * data.length / 2)
    return [*lines, f'return F.cross_entropy({outputs}, reduction="sum") * {share!r}']


def _set(case: Case, patterns: tuple[str, ...], what: str) -> list[str]:
    """Lines that do something to the parameters that match; to a whole module where all of its do.

    what: with {} for the parameter; with "requires_grad_" a module will do too.
    """
    names = list(parameter_shapes(case.model))
    chosen = matching(names, patterns)
    places = []
    for name in chosen:
        place = name
        while "requires_grad_" in what and (above := place.rpartition(".")[0]):
            if not all(other in chosen for other in names if other.startswith(f"{above}.")):
                break
            place = above
        if place not in places:
            places.append(place)
    parts = [attribute(place) for place in places]
    if len(parts) < 3:
        return [what.format(part) for part in parts]
    return [f"for part in {words(parts)}:", f"    {what.format('part')}"]


def _stem(case: Case, classes: dict[str, Class]) -> str:
    model = case.model
    match model.stem:
        case "dense":
            return f"nn.Linear({model.inputs}, {model.width})"
        case "conv":
            given = f"{model.inputs}, {model.width}, {STEM_KERNEL}, padding={STEM_KERNEL // 2}"
            return f"{_over_length('Conv', 'nn.Conv1d', classes)}({given})"
        case "embedding":
            pad = "" if model.padding_idx is None else f", padding_idx={model.padding_idx}"
            return f"nn.Embedding({model.inputs}, {model.width}{pad})"


def _network(case: Case, order: tuple[int, ...]) -> Class:
    """Return the model's class where layers are not called in sequence."""
    lines = ["x = self.stem(x)"]
    if case.model.side:
        lines.append("x = x if side is None else x + self.side(side)")
    if order == tuple(range(len(case.model.blocks))):
        lines += ["for block in self.blocks:", "    x = block(x)"] if order else []
    else:
        lines += [f"for index in {words(map(str, order))}:", "    x = self.blocks[index](x)"]
    lines.append("return self.head(x)")
    return Class("Model", "nn.Module", lines, "x, side=None" if case.model.side else "x")


def _block(spec: Block, width: int, classes: dict[str, Class]) -> str:
    """Return the expression that makes a block."""
    layers: dict[str, str] = {}
    bias = "" if spec.bias else ", bias=False"
    base = "nn.Sequential"
    match spec.kind:
        case "mlp":
            layers = _mlp(spec, width)
        case "attention":
            base = _attention(spec, width, classes)
            layers["qkv"] = f"nn.Linear({width}, {3 * width}{bias})"
            layers["out"] = f"nn.Linear({width}, {width}{bias})"
        case "conv":
            given = f"{width}, {width}, {spec.kernel}, padding={spec.kernel // 2}{bias}"
            layers["conv"] = f"{_over_length('Conv', 'nn.Conv1d', classes)}({given})"
        case "recurrent":
            name = _added(Class("Gru", "nn.GRU", ["return super().forward(x)[0]"]), classes)
            layers["gru"] = f"{name}({width}, {width}, batch_first=True{bias})"
        case "experts":
            layers["experts"] = f"{_experts(spec, width, classes)}({width}, {spec.experts}{bias})"
        case "layer_norm":
            layers["norm"] = f"nn.LayerNorm({width}{bias})"
        case "rms_norm":
            layers["norm"] = f"nn.RMSNorm({width}, eps=1e-5)"
        case "group_norm":
            name = _over_length("GroupNorm", "nn.GroupNorm", classes)
            layers["norm"] = f"{name}({spec.heads}, {width})"
        case "batch_norm":
            name = _over_length("BatchNorm", "nn.BatchNorm1d", classes)
            layers["norm"] = f"{name}({width})"
    if spec.dropout:
        layers["dropout"] = f"nn.Dropout({spec.dropout!r})"
    name = _with_options(spec, base, classes)
    return f"{name}(OrderedDict({', '.join(f'{key}={text}' for key, text in layers.items())}))"


def _mlp(spec: Block, width: int) -> dict[str, str]:
    bias = "" if spec.bias else ", bias=False"
    return {
        "up": f"nn.Linear({width}, {spec.hidden}{bias})",
        spec.activation: "nn.GELU()" if spec.activation == "gelu" else "nn.ReLU()",
        "down": f"nn.Linear({spec.hidden}, {width}{bias})",
    }


def _with_options(spec: Block, base: str, classes: dict[str, Class]) -> str:
    """Return the class name of a block that does more than run its layers, or the base."""
    value = "super().forward(x)"
    if spec.checkpoint:
        value = "checkpoint(super().forward, x, use_reentrant=False)"
    parts = [base.rpartition(".")[2]] if base != "nn.Sequential" else []
    fields = []
    if spec.checkpoint:
        parts.append("Checkpointed")
    if spec.gain:
        parts.append("Scaled")
        value = f"{value} * self.gain"
        fields = ["self.gain = nn.Parameter(torch.ones(()))"]
    if spec.residual:
        parts.append("Residual")
        value = f"x + {value}"
    if not (spec.checkpoint or spec.gain or spec.residual):
        return base
    name = "".join(parts)
    given = "layers" if fields else ""
    made = Class(name, base, [f"return {value}"], fields=fields, given=given)
    return _added(made, classes)


def _attention(spec: Block, width: int, classes: dict[str, Class]) -> str:
    depth = width // spec.heads
    made = Class(
        "Attention",
        "nn.Sequential",
        [
            f"qkv = self.qkv(x).unflatten(-1, (3, {spec.heads}, {depth}))",
            "q, k, v = qkv.permute(2, 0, 3, 1, 4)",
            f"y = torch.softmax(q @ k.mT / {depth}**0.5, dim=-1) @ v",
            "return self.out(y.transpose(1, 2).flatten(2))",
        ],
    )
    return _added(made, classes)


def _experts(spec: Block, width: int, classes: dict[str, Class]) -> str:
    """Return the class name of the router, a linear layer that has the experts."""
    inside = ", ".join(f"{key}={text}" for key, text in _mlp(spec, width).items())
    made = Class(
        "Experts",
        "nn.Linear",
        [
            "share, chosen = torch.softmax(super().forward(x), dim=-1).max(dim=-1, keepdim=True)",
            "y = torch.zeros_like(x)",
            "for number, mlp in enumerate(self.mlps):",
            "    if (chosen == number).any():  # else it is not called",
            "        y = torch.where(chosen == number, mlp(x) * share, y)",
            "return y",
        ],
        fields=[
            "self.mlps = nn.ModuleList()",
            f"for _ in range({spec.experts}):",
            f"    self.mlps.append(nn.Sequential(OrderedDict({inside})))",
        ],
        given="*given, **options",
    )
    return _added(made, classes)


def _over_length(name: str, base: str, classes: dict[str, Class]) -> str:
    """Add a class of layers over channels, called on (batch, length, channels); return its name."""
    value = "super().forward(x.transpose(1, 2)).transpose(1, 2)"
    return _added(Class(name, base, [f"return {value}"]), classes)


def _added(made: Class, classes: dict[str, Class]) -> str:
    """Add a class; return its name, with a number if another class has the name."""
    name, number = made.name, 1
    while name in classes and replace(classes[name], name=made.name) != made:
        number += 1
        name = f"{made.name}{number}"
    classes[name] = replace(made, name=name)
    return name
