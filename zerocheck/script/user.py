"""A user's `build` function in a script: its module is imported, and zerocheck is not.

The file is read, never run. It may use zerocheck's `Built(model, optimizer)` and `groups`, for
which the script has two lines of its own.
"""

from __future__ import annotations

import ast
import keyword
from pathlib import Path

from ..adapters.shared.script_text import (
    Gather,
    ShardingText,
    common_options,
    group_options,
    grouped,
    quoted,
)
from ..case.schema import Case
from ..errors import UsageError

TAKEN = ("Built", "groups")
"""What a script can stand in for."""


def user_sharding(name: str, case: Case) -> ShardingText:
    """Return the sharding text for `path/to/file.py:function`.

    Raises UsageError, with the obstacle, for a function that needs more of zerocheck than TAKEN.
    """
    where, _, function = name.rpartition(":")
    path = Path(where)
    if path.suffix != ".py" or not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise _refused(name, "is not of the form path/to/file.py:function")
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError) as error:
        raise _refused(name, f"cannot be read: {error}") from error
    if not any(isinstance(one, ast.FunctionDef) and one.name == function for one in tree.body):
        raise _refused(
            name, f"has no function {function} at its top level; a class needs zerocheck"
        )
    _check_zerocheck(name, tree)
    gather, sync = _kind(name, source)
    fields = _case_fields(tree, case)
    sharded = f'init_device_mesh("cpu", ({case.world_size},), mesh_dim_names=("shard",))'
    stand_in = [
        "# What the module takes of zerocheck, so that torch alone is enough.",
        'zerocheck = ModuleType("zerocheck")',
        "zerocheck.Built = lambda model, optimizer: (model, optimizer)",
        f"zerocheck.groups = lambda model, case: {_groups(case)}",
        'sys.modules["zerocheck"] = zerocheck',
    ]
    imports_zerocheck = "zerocheck" in {module for module, _ in _imported(tree)}
    call = f"model, optimizer = {function}(build(), {fields}, mesh)"
    return ShardingText(
        title=f"{path.name}:{function}",
        gather=gather,
        setup=[
            f"sys.path.insert(0, {quoted(str(path.resolve().parent))})",
            f"from {path.stem} import {function}",
            "",
            f"mesh = {sharded}",
            call,
        ],
        wrap=[],
        sync=sync,
        clip="model.clip_grad_norm_({maximum}{norm})"
        if gather == "summoned"
        else "nn.utils.clip_grad_norm_(model.parameters(), {maximum}{norm})",
        first=stand_in if imports_zerocheck else [],
        built=False,
        sharded=gather != "replicated",
    )


def _refused(name: str, why: str) -> UsageError:
    return UsageError(f"no script of torch alone for {name}: it {why}")


def _check_zerocheck(name: str, tree: ast.Module) -> None:
    """Raise UsageError if the module uses more of zerocheck than a script can replace."""
    for module, attribute in _imported(tree):
        if module.partition(".")[0] == "zerocheck" and (module, attribute) != ("zerocheck", ""):
            raise _refused(name, f"imports {module}.{attribute}".rstrip(".") + " of zerocheck")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is(node.value, "zerocheck") and node.attr not in TAKEN:
                raise _refused(name, f"uses zerocheck.{node.attr}")
            if node.attr in ("semantics", "supports", "fixed"):
                raise _refused(name, f"declares {node.attr}, which a script does not know")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "Built"
            and (node.keywords or len(node.args) != 2)
        ):
            raise _refused(name, "gives Built more than a model and an optimizer")


def _kind(name: str, source: str) -> tuple[Gather, str]:
    """Return how to gather whole tensors, and the method that defers the reduction of gradients."""
    if "FullyShardedDataParallel" in source:
        if "use_orig_params=True" not in source:
            raise _refused(name, "wraps in FullyShardedDataParallel without use_orig_params=True")
        return "summoned", "no_sync"
    if "fully_shard" in source:
        return "dtensor", "set_requires_gradient_sync"
    return "replicated", "no_sync" if "DistributedDataParallel" in source else ""


def _case_fields(tree: ast.Module, case: Case) -> str:
    """Return an expression for the part of `case` that the module reads."""
    read: dict[str, dict[str, object]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if _is(node.value, "case") and not isinstance(getattr(case, node.attr, None), int | tuple):
            read.setdefault(node.attr, {})
        elif _is(node.value, "case"):
            read[node.attr] = {"": getattr(case, node.attr)}
        inner = node.value
        if isinstance(inner, ast.Attribute) and _is(inner.value, "case"):
            section = getattr(case, inner.attr, None)
            if hasattr(section, node.attr):
                read.setdefault(inner.attr, {})[node.attr] = getattr(section, node.attr)
    if not read:
        return "None"
    parts = []
    for section, fields in read.items():
        if "" in fields:
            parts.append(f"{section}={fields['']!r}")
            continue
        inside = ", ".join(f"{key}={_literal(value)}" for key, value in fields.items())
        parts.append(f"{section}=SimpleNamespace({inside})")
    return f"SimpleNamespace({', '.join(parts)})"


def _literal(value: object) -> str:
    return quoted(value) if isinstance(value, str) else repr(value)


def _groups(case: Case) -> str:
    if grouped(case):
        return "groups(model)"
    given = group_options(case, case.optimizer.groups[0]) + common_options(case)
    parameters = "[p for p in model.parameters() if p.requires_grad]"
    if not given:
        return parameters
    return f"[dict({', '.join([f'params={parameters}', *given])})]"


def _imported(tree: ast.Module) -> list[tuple[str, str]]:
    """Return (module, name) of every import; name is "" for a module itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def _is(node: object, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
