"""Parts of a script's source text: imports, tuples and docstrings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

WIDTH = 100
"""Columns of a line of prose."""

STANDARD = (
    "collections",
    "contextlib",
    "datetime",
    "fnmatch",
    "functools",
    "itertools",
    "sys",
    "tempfile",
    "types",
)

NAMES = {
    "sys": "",
    "tempfile": "",
    "torch": "",
    "dist": "torch.distributed as dist",
    "mp": "torch.multiprocessing as mp",
    "OrderedDict": "collections",
    "nullcontext": "contextlib",
    "timedelta": "datetime",
    "fnmatch": "fnmatch",
    "partial": "functools",
    "product": "itertools",
    "ModuleType": "types",
    "SimpleNamespace": "types",
    "nn": "torch",
    "init_device_mesh": "torch.distributed.device_mesh",
    "BackwardPrefetch": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
    "ShardingStrategy": "torch.distributed.fsdp",
    "fully_shard": "torch.distributed.fsdp",
    "ShardedGradScaler": "torch.distributed.fsdp.sharded_grad_scaler",
    "CustomPolicy": "torch.distributed.fsdp.wrap",
    "size_based_auto_wrap_policy": "torch.distributed.fsdp.wrap",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
    "F": "torch.nn",
    "DistributedDataParallel": "torch.nn.parallel",
    "checkpoint": "torch.utils.checkpoint",
}
"""What a script may use -> the module that it is imported from; "" for a module itself."""

AS = {"F": "functional as F"}
"""How a name is imported, where it has another one there."""


def imports(body: str) -> str:
    """Return the imports that a body needs, sorted as isort does: standard library, then torch."""
    used = [name for name in NAMES if re.search(rf"(?<![\w.\"]){name}\b(?!\")", body)]
    modules: dict[str, list[str]] = {}
    plain = []
    for name in used:
        where = NAMES[name]
        if not where or " as " in where:
            plain.append(f"import {where or name}")
        else:
            modules.setdefault(where, []).append(AS.get(name, name))
    lines = sorted(plain, key=lambda line: line.split()[1])
    for where in sorted(modules):
        names = sorted(modules[where], key=_order)
        lines.append(f"from {where} import {', '.join(names)}")
    ours = [line for line in lines if _of_the_standard_library(line)]
    rest = [line for line in lines if line not in ours]
    return "\n".join([*ours, "", *rest])


def words(given: Iterable[str]) -> str:
    """Return the source of a tuple of expressions."""
    items = list(given)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def prose(text: str, *, width: int = WIDTH - 2) -> list[str]:
    """Return lines of a docstring, with text of a case file made harmless.

    It has no quotes and no escapes then.
    """
    harmless = text.encode("ascii", "replace").decode().replace("\\", "/").replace('"', "'")
    harmless = "".join(letter if letter.isprintable() else " " for letter in harmless)
    return textwrap.wrap(harmless, width, break_long_words=True)


def _order(name: str) -> tuple[int, str]:
    """Return isort's key: constants, then classes, then functions."""
    word = name.split()[0]
    kind = 0 if word.isupper() and len(word) > 1 else 1 if word[0].isupper() else 2
    return kind, word


def _of_the_standard_library(line: str) -> bool:
    return line.split()[1].partition(".")[0] in STANDARD
