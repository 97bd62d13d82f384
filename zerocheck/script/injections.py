"""Text of faults that are injected at the collectives: a few lines of a dispatch mode each.

They are what `faults/injections/` does, said for the one operator that the implementation calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..adapters.shared.script_text import Gather, ShardingText
from ..case.schema import Case
from ..errors import UsageError, unknown

Kind = Literal["reduction", "gather", "norm", "broadcast"]

GATHERS = "c10d::_allgather_base_"
GATHERS_LISTS = "c10d::allgather_"  # what FSDP1 calls on the CPU: a tensor for each rank's shard
ALL_REDUCES = "c10d::allreduce_"
REDUCE_SCATTERS = "c10d::_reduce_scatter_base_"


@dataclass(frozen=True)
class ScriptFault:
    """Fault to inject: its text, the collectives that it changes, lines before and after the call.

    They name `given` (what this rank puts in), `got` (where the caller wants the result), `now`
    (the right result), `mine` (what it would be, had nothing been reduced; only where `local`) and
    KEPT, a dict. first: only in the first step.
    """

    says: str
    kind: Kind
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    local: bool = False
    first: bool = False
    listed: tuple[str, ...] = ()
    """In place of `after` where `got` is a list of shards, one per rank."""


_STALE = ("got.copy_(KEPT.get(now.shape, now))", "KEPT[now.shape] = now")
_FROM_NEXT = (
    "shards = [torch.empty_like(now) for _ in range(WORLD_SIZE)]",
    "dist.all_gather(shards, now)",
    "got.copy_(shards[(dist.get_rank() + 1) % WORLD_SIZE])",
)
_SWAPPED = (
    "first, *rest, last = now.flatten().chunk(WORLD_SIZE)",
    "got.copy_(torch.cat([last, *rest, first]).view_as(got))",
)

FAULTS: dict[str, ScriptFault] = {
    "average-becomes-sum": ScriptFault(
        "the average over ranks is a sum", "reduction", before=("given.mul_(WORLD_SIZE)",)
    ),
    "double-average": ScriptFault(
        "the average is divided once more",
        "reduction",
        before=("given.div_(WORLD_SIZE)",),
    ),
    "first-step-local": ScriptFault(
        "the first step is not reduced",
        "reduction",
        after=("got.copy_(mine)",),
        local=True,
        first=True,
    ),
    "rank-left-out": ScriptFault(
        "the last rank puts zeros in",
        "reduction",
        before=("given.mul_(0 if dist.get_rank() == WORLD_SIZE - 1 else 1)",),
    ),
    "rank-counted-twice": ScriptFault(
        "the first rank counts twice",
        "reduction",
        before=("given.mul_(2 if dist.get_rank() == 0 else 1)",),
    ),
    "neighbours-shard": ScriptFault(
        "each rank gets the reduced shard of the next one", "reduction", after=_FROM_NEXT
    ),
    "last-element-local": ScriptFault(
        "the last element of each bucket is not reduced",
        "reduction",
        after=("got.copy_(now)", "got.view(-1)[-1] = mine.view(-1)[-1]"),
        local=True,
    ),
    "reduction-stale": ScriptFault(
        "a reduction hands out the result of the step before", "reduction", after=_STALE
    ),
    "reduced-in-bf16": ScriptFault(
        "gradients travel in bf16", "reduction", before=("given.copy_(given.bfloat16())",)
    ),
    "result-rounded": ScriptFault(
        "reduced gradients pass a buffer in bf16",
        "reduction",
        after=("got.copy_(got.bfloat16())",),
    ),
    "gather-stale": ScriptFault(
        "what is gathered is what the gather before gave",
        "gather",
        after=_STALE,
        listed=(
            "now = [shard.clone() for shard in got]",
            "torch._foreach_copy_(got, KEPT.get(now[0].shape, now))",
            "KEPT[now[0].shape] = now",
        ),
    ),
    "gather-swapped": ScriptFault(
        "the shards of the first and the last rank change places",
        "gather",
        after=_SWAPPED,
        listed=(
            "first = got[0].clone()",
            "got[0].copy_(got[-1])",
            "got[-1].copy_(first)",
        ),
    ),
    "gather-rounded": ScriptFault(
        "shards travel in bf16",
        "gather",
        after=("got.copy_(now.bfloat16())",),
        listed=("for shard in got:", "    shard.copy_(shard.bfloat16())"),
    ),
    "broadcast-lost": ScriptFault(
        "a broadcast does not arrive", "broadcast", after=("got.copy_(mine)",), local=True
    ),
    "norm-local": ScriptFault("the norm is not reduced", "norm"),
}
"""By name, as `IMPLEMENTATION+FAULT` spells it."""


@dataclass(frozen=True)
class ScriptInjection:
    """Text of an injected fault.

    source: lines of the class `Fault`; where: which part of a step is within it; only: an
    expression that says in which steps, or "" for all.
    """

    source: list[str]
    where: Literal["backward", "clip", "step"]
    only: str

    @property
    def keeps(self) -> bool:
        """True if the lines need the dict KEPT."""
        return any("KEPT" in line for line in self.source)


def injection_of(name: str, fault: str, case: Case, text: ShardingText) -> ScriptInjection:
    """Return the fault in the collectives that the implementation `name` calls.

    Raises UsageError for a fault that has no short text, or that changes none of its collectives.
    """
    if fault not in FAULTS:
        raise unknown(f"fault that a script can inject into {name},", fault, FAULTS)
    given = FAULTS[fault]
    if case.world_size == 1:
        raise UsageError(f"the injected fault {fault} needs 2 ranks or more")
    # Sharded code gathers parameters and reduce-scatters gradients; other code all-reduces them.
    gather, sharded = text.gather, text.sharded
    reduces_shards = fault == "neighbours-shard"
    if (given.kind in ("gather", "norm") or reduces_shards) and not sharded:
        raise UsageError(f"nothing to inject {fault} into: {name} cuts no gradient")
    if given.kind == "broadcast" and not text.broadcasts:
        raise UsageError(f"nothing to inject {fault} into: {name} broadcasts no parameter")
    where: Literal["backward", "clip", "step"] = "backward"
    if given.kind == "norm":
        where = "clip"
        lines = _norm(gather)
    else:
        if given.kind == "broadcast":
            where = "step"
        lines = _collective(given, sharded=sharded, lists=gather == "summoned")
    return ScriptInjection(_class(given, lines), where, "step == 0" if given.first else "")


def _class(fault: ScriptFault, lines: list[str]) -> list[str]:
    return [
        f"class Fault(TorchDispatchMode):  # {fault.says}",
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):",
        *(f"        {line}" for line in lines),
    ]


def _collective(fault: ScriptFault, *, sharded: bool, lists: bool) -> list[str]:
    """Return the lines for operators of c10d, which write in place and return a Work."""
    if fault.kind == "broadcast":
        operator, sharded = "c10d::broadcast_", False
    elif fault.kind == "gather":
        operator = GATHERS_LISTS if lists else GATHERS
        sharded = not lists
    else:
        operator = REDUCE_SCATTERS if sharded else ALL_REDUCES
    got = "args[0]" if sharded else "args[0][0]"
    given = "args[1]" if sharded else got
    before = [line.replace("given", given) for line in fault.before]
    condition = f'if func._schema.name == "{operator}":'
    if not fault.after:
        inner = (f"    {line}" for line in before)
        return [condition, *inner, "return func(*args, **(kwargs or {}))"]
    waited = ["dist.Work.unbox(result[1]).wait()"]
    if operator == REDUCE_SCATTERS:
        mine = "args[1].chunk(WORLD_SIZE)[dist.get_rank()].clone()"
        return [
            condition.replace("==", "!="),
            "    return func(*args, **(kwargs or {}))",
            *([f"mine = {mine}"] if fault.local else []),
            "now = args[0].clone()  # gloo writes it anew whenever somebody waits",
            "result = func(now, *args[1:], **(kwargs or {}))",
            *waited,
            *(line.replace("got", got) for line in fault.after),
            "return result",
        ]
    after = list(fault.after)
    if operator == GATHERS_LISTS:
        after = list(fault.listed)
    elif any("KEPT" in line for line in after):
        after.insert(0, "now = got.clone()")
    else:
        after = [line.replace("now", "got") for line in after if line != "got.copy_(now)"]
    return [
        *([condition, f"    mine = {got}.clone()"] if fault.local else []),
        "result = func(*args, **(kwargs or {}))",
        condition,
        *(f"    {line.replace('got', got)}" for line in (*waited, *after)),
        "return result",
    ]


def _norm(gather: Gather) -> list[str]:
    """Return the lines for the all-reduce of a 0-d tensor."""
    if gather == "dtensor":
        return [
            "if DTensor in types:",
            "    return NotImplemented  # it calls collectives on its local tensors",
            'if func._schema.name == "_c10d_functional::all_reduce":',
            "    return args[0].clone()",
            "return func(*args, **(kwargs or {}))",
        ]
    return [
        f'mine = args[0][0].clone() if func._schema.name == "{ALL_REDUCES}" else None',
        "result = func(*args, **(kwargs or {}))",
        "if mine is not None:",
        "    dist.Work.unbox(result[1]).wait()",
        "    args[0][0].copy_(mine)",
        "return result",
    ]
