"""What FSDP1 holds: ranges of memory, padding, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1GradOp, Fsdp1NoShard
from zerocheck.adapters.fsdp1.layout import flat_units
from zerocheck.case.schema import (
    Block,
    Case,
    Group,
    Model,
    Optimizer,
    Precision,
    Sharding,
    Training,
)
from zerocheck.contract import Implementation
from zerocheck.contract.memory_order import boxes, in_memory_order, order_of

from ..cases import CASES, MLP, on
from ..driver import View, assembled, copied, in_ranks

KINDS: list[type[Implementation]] = [Fsdp1, Fsdp1GradOp, Fsdp1NoShard]


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    numel = int(torch.tensor(shape).prod())
    start = draw(st.integers(0, numel))
    return shape, order, start, draw(st.integers(start, numel))


@given(_ranges())
def test_boxes_are_the_range(drawn: tuple[Any, ...]) -> None:
    """Every element of the range of memory is in one box, at its place."""
    shape, order, start, stop = drawn
    stored = torch.arange(int(torch.tensor(shape).prod()))
    back = tuple(order.index(dim) for dim in range(len(order)))
    whole = stored.view([shape[dim] for dim in order]).permute(back)
    assert order_of(shape, whole.stride()) == order or 1 in shape
    order = order_of(shape, whole.stride())
    assert torch.equal(in_memory_order(whole, order), stored)
    back = tuple(order.index(dim) for dim in range(len(order)))
    seen = []
    for index, extent, low, high in boxes(shape, order, start, stop):
        assert torch.equal(whole[index], stored[low:high].view(extent).permute(back))
        seen += list(range(low, high))
    assert seen == list(range(start, stop))


class _Transposed(nn.Module):
    """Matrices that are stored transposed, of sizes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 3)])
        for layer in (self.stem, self.blocks[0]):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())  # type: ignore[union-attr]


def _held(mesh: DeviceMesh, cases: list[tuple[type[Implementation], Case]]) -> list[list[View]]:
    shown = []
    for kind, case in cases:
        implementation = kind(_Transposed(), case, mesh)
        shown.append(copied(implementation))
        full: dict[tuple[str, str], torch.Tensor] = {}
        for name, parameter in _Transposed().named_parameters():
            full[name, "step"] = torch.tensor(3.0)
            for place, role in enumerate(("parameter", "exp_avg", "exp_avg_sq")):
                full[name, role] = torch.arange(float(parameter.numel())).view(parameter.shape)
                full[name, role] += 100 * place
        implementation.restore(full)
        shown.append(copied(implementation))
        implementation.close()
    return shown


@pytest.mark.parametrize("world_size", [1, 3])
def test_transposed_parameters_are_shown_and_restored(world_size: int) -> None:
    """Shards tile the tensors and hold what a single device has, whatever the order of memory."""
    jobs = [
        (kind, Case(mesh=(world_size,), sharding=Sharding(wrap="block", use_orig_params=original)))
        for kind, original in itertools.product(KINDS, (True, False))
    ]
    ranks = in_ranks(world_size, _held, jobs)
    for number in range(2 * len(jobs)):
        views = [rank[number] for rank in ranks]
        for name, parameter in _Transposed().named_parameters():
            counted = torch.arange(float(parameter.numel())).view(parameter.shape)
            if number % 2 == 0:
                found = assembled(views, "parameter")[name]
                assert found is not None and torch.equal(found, parameter)
                continue
            for place, role in enumerate(("parameter", "exp_avg", "exp_avg_sq")):
                found = assembled(views, role)[name]
                assert found is not None and torch.equal(found, counted + 100 * place)


def _sizes(mesh: DeviceMesh, case: Case) -> list[tuple[int, int, int]]:
    """Elements of parameters, of padding and of flat shards on this rank."""
    from zerocheck.models.network import build_model

    sizes = []
    for original in (True, False):
        sharding = msgspec.structs.replace(case.sharding, use_orig_params=original)
        implementation = Fsdp1(
            build_model(case), msgspec.structs.replace(case, sharding=sharding), mesh
        )
        shards = list(implementation.shards())
        counts = [
            sum(s.tensor.numel() for s in shards if s.role == role and s.tensor is not None)
            for role in ("parameter", "padding")
        ]
        flat = sum(one.tensor.numel() for one in implementation.flats)
        sizes.append((counts[0], counts[1], flat))
        implementation.close()
    return sizes


def test_padding_is_shown_and_the_ledger_closes() -> None:
    """What a rank holds is parameters and padding, nothing else; some rank holds padding."""
    ranks = in_ranks(3, _sizes, on(CASES["plain"], 3, "layer"))
    for original in range(2):
        held = [rank[original] for rank in ranks]
        assert all(parameters + padding == flat for parameters, padding, flat in held)
        assert len({flat for _, _, flat in held}) == 1
        assert any(padding for _, padding, _ in held)


def _case(**given: Any) -> Case:
    return Case(**{"model": MLP, **given})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (_case(precision=Precision(compute="fp16")), "computes and reduces in fp32"),
        (_case(sharding=Sharding(optimizer_first=True, use_orig_params=False)), "after FSDP"),
        (
            _case(sharding=Sharding(optimizer_first=True), optimizer=Optimizer(kind="adagrad")),
            "do not fit the shards",
        ),
        (
            _case(
                optimizer=Optimizer(groups=(Group(pattern="*.bias"), Group())),
                sharding=Sharding(use_orig_params=False),
            ),
            "groups",
        ),
        (
            _case(
                model=msgspec.structs.replace(MLP, frozen=("*.up.bias",)),
                sharding=Sharding(use_orig_params=False),
            ),
            "frozen in part",
        ),
        (
            _case(
                model=Model(stem="embedding", inputs=9, outputs=9, tied=True),
                sharding=Sharding(wrap="size", bucket=16),
            ),
            "shared by units",
        ),
    ],
)
def test_refusals_say_why(case: Case, reason: str) -> None:
    for kind in (Fsdp1, Fsdp1NoShard):
        assert reason in (kind.supports(case) or "")


def test_a_unit_called_twice_in_mixed_precision_is_refused_where_a_gradient_is_there() -> None:
    """What each call gives is added to it by itself. Zeros are there where nothing is sharded."""
    bf16 = Precision(compute="bf16")
    twice = msgspec.structs.replace(MLP, calls=(0, 0))
    for training, sharded, whole in (
        (Training(), True, True),
        (Training(microbatches=2), False, False),
        (Training(set_to_none=False), True, False),
    ):
        for ranks in (1, 2):
            given = _case(mesh=(ranks,), model=twice, training=training, precision=bf16)
            fine = sharded if ranks > 1 else whole
            assert (Fsdp1.supports(given) is None) is fine
            assert (Fsdp1NoShard.supports(given) is None) is whole
            assert Fsdp1NoShard.supports(msgspec.structs.replace(given, model=MLP)) is None
            wide = msgspec.structs.replace(given, precision=Precision())
            assert Fsdp1NoShard.supports(wide) is None


def test_what_is_not_refused() -> None:
    groups = Optimizer(groups=(Group(pattern="blocks.0.*"), Group()))
    for sharding in (Sharding(use_orig_params=False), Sharding(wrap="size", bucket=16)):
        assert Fsdp1.supports(_case(optimizer=groups, sharding=sharding)) is None
    tied = Model(stem="embedding", inputs=9, outputs=9, tied=True)
    assert Fsdp1.supports(_case(model=tied, sharding=Sharding(wrap="layer"))) is None


def _norms(mesh: DeviceMesh) -> list[float]:
    """Norms by the whole model, of a rank that holds next to nothing."""
    case = Case(
        mesh=(mesh.size(),),
        model=Model(inputs=2, width=1, blocks=(Block(kind="mlp", hidden=1),), outputs=1),
        sharding=Sharding(wrap="layer"),
    )
    from zerocheck.models.network import build_model

    implementation = Fsdp1(build_model(case), case, mesh)
    for parameter in implementation.built.model.parameters():
        if parameter.numel():
            parameter.grad = torch.full_like(parameter, 3.0)
    total = torch.tensor(float(sum(p.numel() for p in implementation.built.model.parameters())))
    dist.all_reduce(total)
    norm = implementation.clip(1.0, 2.0)
    implementation.close()
    return [norm, 3.0 * float(total) ** 0.5]


def test_clipping_is_by_the_norm_over_all_ranks() -> None:
    for norm, expected in in_ranks(2, _norms):
        assert norm == pytest.approx(expected, rel=1e-6)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 7), nn.BatchNorm1d(7)


class WithNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 7), nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList([Normed(), Normed()])


def _flat_sizes(mesh: DeviceMesh, case: Case) -> list[int]:
    """Elements of each flat parameter that FSDP1 makes, padding left out."""
    model: Any = Fsdp1(WithNorms(), case, mesh).built.model
    handles = [one._handle for one in FullyShardedDataParallel.fsdp_modules(model)]
    return sorted(sum(one.flat_param._numels) for one in handles if one is not None)


@pytest.mark.parametrize("wrap", ["whole", "block"])
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_batch_norms_are_units_where_torch_makes_them(wrap: str, reduce: str) -> None:
    sharding = Sharding(wrap=wrap, prefetch=0, use_orig_params=False)
    case = Case(mesh=(2,), precision=Precision(reduce=reduce), sharding=sharding)
    model = WithNorms()
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    expected = [sum(sizes[name] for name in names) for names in flat_units(model, case).values()]
    assert in_ranks(2, _flat_sizes, case) == [sorted(expected)] * 2
