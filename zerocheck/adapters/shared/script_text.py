"""Text that shards a model as a user of torch writes it: the parts that several adapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Literal, NamedTuple

from torch import nn

from ...case.schema import Case, Group
from ...case.schema import Sharding as SharedOptions
from ...optimizers import UpdateRule, optimizer_of
from .units import in_order_of_calls, skeleton

Gather = Literal["replicated", "dtensor", "summoned", "flat"]
"""Way to get a whole tensor: it is whole on every rank; from a DTensor; from FSDP1's original
parameters; from its flat ones."""

Units = Callable[[nn.Module, SharedOptions], list[nn.Module]]
"""Which modules are units below the root."""


@dataclass
class ShardingText:
    """Text that makes `model` and `optimizer`, without indent.

    setup: makes both, wrap: the model alone; sync: "no_sync", "set_requires_gradient_sync" or ""
    for neither; clip: what is called with the maximum norm; rewrap: unfreezes all
    parameters and makes `model` anew; first: lines at the top of the script.
    """

    title: str
    gather: Gather
    setup: list[str]
    wrap: list[str]
    sync: str
    clip: str = "nn.utils.clip_grad_norm_(model.parameters(), {maximum}{norm})"
    rewrap: str = ""
    scaler: str = ""
    """Expression for the scaler of losses, "" without one."""
    scaler_class: str = "torch.amp.GradScaler"
    first: list[str] = field(default_factory=list)
    built: bool = True
    """True if `model` is to be there before `setup`."""
    flat: list[str] = field(default_factory=list)
    """Names of parameters in the order of flat ones, where it is not that of the model."""
    sharded: bool = False
    """True if each rank has a part of each parameter."""
    rename: str = 'removeprefix("module.")'
    """Method of `str` that gives the name in the bare model."""
    optimizer: str = "optimizer"
    """Expression for the optimizer that has the states."""
    replaces_frozen: bool = False
    """True if frozen parameters of the model are other tensors after a forward."""
    checks_optimizer: bool = False
    """True if the optimizer itself may be at fault before it takes a step."""


class AdapterScript(NamedTuple):
    """Text of one implementation, in torch's words: its title, and the text of a case.

    reasons(case, checks, steps): why it cannot be shown, on top of what holds for all.
    """

    title: str
    text: Callable[[Case], ShardingText]
    reasons: Callable[[Case, Sequence[str], int], Iterable[str]] = lambda *_: ()


def options(given: Iterable[tuple[str, object, object]]) -> list[str]:
    """Return `name=value` for each (name, value, default) that is not at its default."""
    return [f"{name}={value!r}" for name, value, default in given if value != default]


def quoted(text: str) -> str:
    """Return a string literal of the text."""
    plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
    return f'"{text}"' if plain else ascii(text)


def attribute(path: str) -> str:
    """Convert the path "blocks.0.up" to `model.blocks[0].up`."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
    return f"model{''.join(parts)}"


def optimizer_call(case: Case, of: str, *, fused: bool) -> str:
    """Return the optimizer of the case over the parameters of the model `of`."""
    return f"{torch_name(case)}({', '.join(optimizer_arguments(case, of, fused=fused))})"


def torch_name(case: Case) -> str:
    """Return the optimizer's class: `torch.optim.AdamW`."""
    return f"torch.optim.{_rule(case).torch_class.__name__}"


def group_options(case: Case, group: Group) -> list[str]:
    """Return the options of a group that differ from torch's defaults."""
    return _options(case, group, of_all=False)


def common_options(case: Case) -> list[str]:
    """Return the options of the whole optimizer that differ from torch's defaults."""
    return _options(case, case.optimizer.groups[0], of_all=True)


def _rule(case: Case) -> UpdateRule:
    """Return the one rule of the case's optimizer; a script has no others."""
    (rule,) = optimizer_of(case.optimizer).rules
    return rule


def _options(case: Case, group: Group, *, of_all: bool) -> list[str]:
    optimizer = _rule(case)
    defaults = signature(optimizer.torch_class).parameters
    return options(
        (name, value, defaults[name].default)
        for name, value in optimizer.torch_group(group, case.optimizer).items()
        if name not in ("foreach", "fused") and (name in optimizer.fields.optimizer) == of_all
    )


def grouped(case: Case) -> bool:
    """Return True if there are several parameter groups."""
    return len(case.optimizer.groups) > 1 or case.optimizer.groups[0].pattern != "*"


def optimizer_arguments(case: Case, of: str, *, fused: bool) -> list[str]:
    """Return the arguments of the optimizer over the parameters of the model `of`."""
    optimizer = case.optimizer
    given = common_options(case)
    if fused and optimizer.kernel == "fused":
        given.append("fused=True")
    if grouped(case):
        return [f"groups({of})", *given]
    parameters = f"{of}.parameters()"
    if case.model.frozen and case.training.unfreeze is None:
        parameters = f"[p for p in {parameters} if p.requires_grad]"
    return [parameters, *group_options(case, optimizer.groups[0]), *given]


def in_order(case: Case, optimizer: list[str], wrap: list[str]) -> list[str]:
    """Order the lines: the optimizer after the model is wrapped, or before."""
    return [*optimizer, *wrap] if case.sharding.optimizer_first else [*wrap, *optimizer]


def unit_paths(case: Case, choose: Units) -> list[str]:
    """Paths of the units below the root, in the order of calls."""
    model = skeleton(case)
    modules = choose(model, case.sharding)
    paths = {module: path for path, module in model.named_modules()}
    called = in_order_of_calls(model, modules, case) if case.sharding.wrap != "size" else modules
    return [paths[m] for m in (*called, *(m for m in modules if m not in called))]


def each_unit(units: list[str], what: str) -> list[str]:
    """Lines that put `what` of each unit in its place."""
    if len(units) == 1:
        place = attribute(units[0])
        return [f"{place} = {what.format(place)}"]
    lines = [call_text("paths = ", [quoted(unit) for unit in units])]
    inner = what.format("model.get_submodule(path)")
    return [*lines, "for path in paths:", f"    model.set_submodule(path, {inner})"]


def call_text(head: str, arguments: list[str]) -> str:
    """Return a call, or a tuple with a head such as `units = `."""
    return f"{head}({', '.join(arguments)})"
