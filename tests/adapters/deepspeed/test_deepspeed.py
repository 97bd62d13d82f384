"""DeepSpeed's stages take the right step, refuse what they cannot run, and leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import types
from typing import Any, Literal, cast

import msgspec
import pytest
import torch
from slices import WHOLE, sliced
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.deepspeed.options import stored_as
from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Group,
    Model,
    Optimizer,
    Precision,
    Sharding,
    Start,
    Training,
)
from zerocheck.catalogue import OF_EXTRAS
from zerocheck.contract import Implementation, Semantics, loading
from zerocheck.errors import Unsupported, UsageError
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

from ..driver import in_ranks
from ..holding import holds
from ..test_close import _run
from .deepspeed_cases import CHOSEN, EVERYTHING, KEY, PLAIN, chosen, needs_deepspeed

MIXED = (
    Precision(compute="bf16", reduce="bf16"),
    Precision(compute="bf16", reduce="fp32"),
    Precision(compute="fp32", reduce="bf16"),
)
SHARDED = sliced(("deepspeed1", "deepspeed2", "deepspeed3"), ("deepspeed1", "deepspeed3"))
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("name", OF_EXTRAS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4] if WHOLE else [1, 3])
def test_every_obligation_holds(pool: Pool, name: str, world_size: int) -> None:
    """The judge of a run, on cases that need what the stages have in partitions and buckets."""
    names = list(CHOSEN) if WHOLE else list(KEY) if world_size == 3 else ["mixed"]
    for one in names:
        holds(pool, name, chosen(one, world_size))


@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("name", OF_EXTRAS)
def test_mixed_precision_holds(pool: Pool, name: str) -> None:
    """Of stage 2 with a bucket and without: it divides in bf16, or in fp32."""
    names = ("restore", "frozen", "microbatches") if WHOLE else ("restore",)
    stage = loading.load(name)
    for one, precision in itertools.product(names, MIXED):
        case = msgspec.structs.replace(
            chosen(one, 3), precision=precision, start=Start(step=3, moments="typical")
        )
        if stage.supports(case) is not None:
            assert (stage.stage, precision) == (0, MIXED[1])
            continue
        holds(pool, name, case)


@pytest.mark.long
@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("name", ["deepspeed0", "deepspeed1"] + ["deepspeed2"] * WHOLE)
def test_a_master_without_elements(pool: Pool, name: str) -> None:
    """No partition has a piece of such a parameter, and its master is shown all the same."""
    model = Model(blocks=(Block(kind="mlp", empty=True),))
    case = Case(mesh=(2,), model=model, precision=MIXED[0], start=Start(step=3, moments="typical"))
    holds(pool, name, case, (*EQUIVALENCE, "persistent"))


@needs_deepspeed
@pytest.mark.parametrize("name", ["deepspeed1", "deepspeed2", "deepspeed3"])
def test_offloaded_to_the_cpu(pool: Pool, name: str) -> None:
    """Masters, moments and reduced gradients, of stage 3 parameters too; in torch's AdamW."""
    for one, precision in (("microbatches", Precision()), ("restore", MIXED[1])):
        case = chosen(one, 2)
        sharding = msgspec.structs.replace(case.sharding, offload="pageable")
        case = msgspec.structs.replace(case, sharding=sharding, precision=precision)
        holds(pool, name, case)


@needs_deepspeed
def test_a_bucket_of_bf16_that_offloading_puts_on(pool: Pool) -> None:
    """Its gradients are divided by 3 in bf16, although `contiguous_gradients` is off."""
    sharding, options = Sharding(offload="pageable"), stored_as({"contiguous_gradients": False})
    model = Model(blocks=(Block(kind="mlp", hidden=24), Block(kind="attention")))
    case = Case(mesh=(3,), model=model, sharding=sharding, options=options, precision=MIXED[1])
    holds(pool, "deepspeed2", case)


EMPTY_GROUP = Case(
    model=Model(blocks=(Block(kind="mlp", empty=True),)),
    optimizer=Optimizer(groups=(Group(pattern="*.narrow.*"), Group())),
)


def _offloads(mesh: DeviceMesh, kinds: list[type[Any]], case: Case) -> list[bool]:
    found = []
    for kind in kinds:
        subject = kind(build_model(case), case, mesh)
        names = ("offload_optimizer", "offload_param") if subject.zero == 3 else ("cpu_offload",)
        found.append(all(getattr(subject.optimizer, name) for name in names))
        subject.close()
    return found


@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("offload", ["none", "pageable"])
def test_the_engine_offloads_where_it_is_asked_to(offload: Literal["none", "pageable"]) -> None:
    kinds = [loading.load(f"deepspeed{stage}") for stage in (1, 2, 3)]
    case = Case(mesh=(1,), sharding=Sharding(offload=offload))
    assert in_ranks(1, _offloads, kinds, case) == [[offload == "pageable"] * 3]


def test_what_precision_means_to_each_stage() -> None:
    """Where DeepSpeed's source says so."""
    pytest.importorskip("deepspeed")
    from zerocheck.adapters.deepspeed.precision import semantics_of

    wide = Case(precision=MIXED[1])
    by_stage = {n: semantics_of(Semantics(), wide, n) for n in (1, 2, 3)}
    assert [one.divide_ranks for one in by_stage.values()] == ["reduce", "own", "reduce"]
    assert {(s.compute, s.accumulate_dtype, s.reduce, s.master) for s in by_stage.values()} == {
        ("bf16", "fp32", "fp32", "fp32")
    }
    for left_out in ("contiguous_gradients", "reduce_scatter"):
        apart = msgspec.structs.replace(wide, options=stored_as({left_out: False}))
        assert semantics_of(Semantics(), apart, 2).divide_ranks == "reduce"
    offloaded = msgspec.structs.replace(
        wide,
        sharding=Sharding(offload="pageable"),
        options=stored_as({"contiguous_gradients": False}),
    )
    assert semantics_of(Semantics(), offloaded, 2).divide_ranks == "own"
    narrow = semantics_of(Semantics(), Case(precision=MIXED[2]), 1)
    assert (narrow.compute, narrow.reduce, narrow.master) == ("own", "bf16", "none")


@needs_deepspeed
def test_one_sample_before_frozen_layers(pool: Pool) -> None:
    """Stage 3's nodes keep the strides of a dim of size 1, by which kernels choose; FSDP2's do not.
    The gradient before batch norm is all rounding."""
    blocks = (Block(kind="batch_norm"), Block(kind="mlp", hidden=64))
    case = Case(
        mesh=(1,),
        seed=1,
        model=Model(
            stem="conv", inputs=17, width=12, blocks=blocks, frozen=("blocks.*",), outputs=1
        ),
        data=Data(batch=1, length=4),
        training=Training(steps=1),
    )
    holds(pool, "deepspeed3", case)


@needs_deepspeed
@pytest.mark.parametrize("name", SHARDED)
def test_everything_at_once_holds(pool: Pool, name: str) -> None:
    holds(pool, name, EVERYTHING)


@pytest.mark.parametrize("name", OF_EXTRAS)
def test_without_the_library_the_error_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerocheck.catalogue.find_spec", lambda _: None)
    monkeypatch.setattr(loading, "_loaded", {})
    with pytest.raises(
        UsageError, match=rf"{name} needs .* pip install 'zerocheck-sharding\[deepspeed\]'"
    ):
        loading.load(name)


def test_nothing_imports_deepspeed_unless_it_is_named() -> None:
    """Its import takes seconds, and it is not there without the extra."""
    code = (
        "import sys, zerocheck, zerocheck.cli, zerocheck.faults.registry\n"
        "from zerocheck.catalogue import BUILT_IN\n"
        "from zerocheck.contract.loading import load\n"
        "for name in BUILT_IN: load(name)\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'deepspeed']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_deepspeed
@pytest.mark.parametrize(
    ("case", "stages", "words"),
    [
        (Case(mesh=(2, 2)), (0, 1, 2, 3), "axis"),
        (Case(precision=Precision(compute="fp16")), (0, 1, 2, 3), "fp32 and bf16 only"),
        (Case(precision=Precision(compute="bf16", reduce="fp32")), (0,), "unsupported mix"),
        (
            Case(
                precision=Precision(compute="bf16", reduce="bf16"),
                model=Model(blocks=(Block(kind="batch_norm"),)),
            ),
            (0, 1, 2, 3),
            "running statistics",
        ),
        (Case(training=Training(clip=1.0, norm="inf")), (0, 1, 2, 3), "2-norm"),
        (Case(model=Model(blocks=(Block(kind="mlp", gain=True),))), (0, 1, 2, 3), "0-d"),
        (
            Case(model=Model(blocks=(Block(kind="mlp", transposed=True),))),
            (0, 1, 2, 3),
            "not contiguous",
        ),
        (Case(model=Model(blocks=(Block(kind="mlp", dtype="bf16"),))), (1, 2, 3), "one dtype"),
        (Case(model=Model(side=True)), (1, 2, 3), "mixes them up"),
        (EMPTY_GROUP, (1, 2), "that of blocks.0.narrow"),
        (EMPTY_GROUP, (3,), "never gathers"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(
    case: Case, stages: tuple[int, ...], words: str
) -> None:
    for stage in range(4):
        reason = loading.load(f"deepspeed{stage}").supports(case)
        assert (reason is not None and words in reason) == (stage in stages), (stage, reason)


def _makes_its_own(mesh: DeviceMesh, kinds: list[type[Any]], case: Case) -> list[bool]:
    found = []
    for kind in kinds:
        subject = kind(build_model(case), case, mesh)
        assert type(subject.inner) is torch.optim.AdamW
        found.append(subject.engine.client_optimizer is None)
        subject.close()
    return found


@pytest.mark.every(2)
@needs_deepspeed
@pytest.mark.parametrize("own", [False, True])
def test_the_engine_makes_its_own_optimizer_where_it_is_asked_to(own: bool) -> None:
    kinds = [loading.load(name) for name in OF_EXTRAS]
    case = Case(mesh=(1,), options=stored_as({"own_optimizer": own}))
    assert in_ranks(1, _makes_its_own, kinds, case) == [[own] * len(kinds)]


@needs_deepspeed
def test_another_device_than_the_cpu_is_refused() -> None:
    elsewhere = cast("DeviceMesh", types.SimpleNamespace(device_type="cuda"))
    for name in OF_EXTRAS:
        with pytest.raises(Unsupported, match="on the CPU only, not on cuda"):
            loading.load(name)(nn.Linear(1, 1), Case(), elsewhere)


def _torch() -> dict[tuple[str, ...], int]:
    """What stands where in torch's modules and classes, by identity."""
    found: dict[tuple[str, ...], int] = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.split(".")[0] != "torch":
            continue
        for key, value in list(vars(module).items()):
            kind = type(value)  # not isinstance: torch has things that warn when they are asked
            if kind in FUNCTIONS:
                found[name, key] = id(value)
            elif issubclass(kind, type):
                methods = list(vars(value).items())
                found |= {
                    (name, key, own): id(one) for own, one in methods if type(one) in FUNCTIONS
                }
    return found


def _changed(mesh: DeviceMesh, kinds: list[type[Implementation]], case: Case) -> list[str]:
    for kind in kinds:  # lazy imports
        _run(mesh, kind, case)
    before = _torch()
    for kind in kinds:
        _run(mesh, kind, case)
    after = _torch()
    return [".".join(key) for key in before if after.get(key) != before[key]]


@pytest.mark.long
@needs_deepspeed
def test_torch_is_as_it_was() -> None:
    kinds = [loading.load(name) for name in OF_EXTRAS]
    case = msgspec.structs.replace(EVERYTHING, mesh=(1,))
    assert in_ranks(1, _changed, kinds, case) == [[]]


def test_a_function_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test above."""
    before = _torch()
    monkeypatch.setattr(nn.functional, "linear", lambda *_: None)
    monkeypatch.setattr(nn.Module, "apply", lambda *_: None)
    after = _torch()
    changed = {key for key in before if after.get(key) != before[key]}
    assert ("torch.nn.functional", "linear") in changed
    assert ("torch.nn.modules.module", "Module", "apply") in changed


@needs_deepspeed
def test_others_take_the_same_step_in_its_ranks(pool: Pool) -> None:
    """Bit for bit: FSDP2 before and after DeepSpeed, in the same processes."""
    case = Case(mesh=(2,), model=Model(blocks=(Block(kind="mlp"),)), data=Data(batch=3))
    digests = []
    for name in ("fsdp2", *OF_EXTRAS, "fsdp2"):
        outcome = Trial(pool, name, case, obligations=EQUIVALENCE).outcome(digest=True)
        assert outcome.status == "holds", (name, outcome.reason or outcome.judgement)
        assert outcome.judgement is not None
        digests.append(outcome.judgement.digest)
    assert digests[0] == digests[-1] != ""


@pytest.mark.long
@needs_deepspeed
@pytest.mark.parametrize("name", sliced(SHARDED, SHARDED[-1:]))
def test_nothing_grows(name: str) -> None:
    """No tensor outlives its engine, case after case in one process."""
    case = msgspec.structs.replace(chosen("mixed", 1), sharding=PLAIN[0], options=PLAIN[1])
    (seen,) = in_ranks(1, _tensors_left, loading.load(name), case)
    assert seen[-1] <= seen[0], seen


@pytest.mark.long
@needs_deepspeed
def test_an_engine_that_is_only_destroyed_is_seen_to_grow() -> None:
    """The check of the test above: stage 3 keeps the model of an engine that was destroyed."""
    case = msgspec.structs.replace(chosen("mixed", 1), sharding=PLAIN[0], options=PLAIN[1])
    (seen,) = in_ranks(1, _only_destroyed, loading.load("deepspeed3"), case)
    assert seen[-1] > seen[0], seen


def _only_destroyed(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[int]:
    from zerocheck.adapters.deepspeed import library

    library.closed = lambda engine: engine.destroy()
    return _tensors_left(mesh, kind, case)


def _tensors_left(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[int]:
    seen = []
    for _ in range(3):
        for _ in range(2):
            _run(mesh, kind, case)
        gc.collect()
        seen.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return seen
