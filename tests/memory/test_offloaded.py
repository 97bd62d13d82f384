"""Shards in the memory of the host: what each side holds, copies, and the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from zerocheck.cli import main
from zerocheck.compat_device import DEVICE, simulated_device
from zerocheck.compat_memory import fake_mode
from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.choices import Restriction
from zerocheck.memory.gpu_kernels import fused_attention
from zerocheck.memory.host import simulated_host
from zerocheck.memory.log import Log, Moment, Storage
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import Simulation, simulate, simulate_apart
from zerocheck.memory.source import source
from zerocheck.memory.text import render
from zerocheck.memory.timeline import timeline
from zerocheck.memory.verdict import CUDA_CONTEXT
from zerocheck.protocol.layout import PHASES

NET = """
import os

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 24), nn.Linear(24, 96)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small():
    return Net(2)


def deep():
    return Net(15)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 24)
        attentions = [nn.MultiheadAttention(24, 4, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList(attentions)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, x, x, need_weights=False)[0]
        return x


def attending():
    return Attending()


class Ending(Net):
    def forward(self, tokens):
        os.abort()


def ending():
    return Ending(2)
"""
RANKS = 4
BLOCK, OUTER = 24 * 96 + 96 + 96 * 24 + 24, 96 * 24 + 24 * 96 + 96
"""Elements of a block, and of all that is outside of blocks; each tensor divides by four."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nets") / "net_to_offload.py"
    path.write_text(NET)
    return str(path)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Process that may have an accelerator, which this one must not."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def offloaded(model: str, **changes: Any) -> Setup:
    given = {"world_size": RANKS, "sequence": 8, "offload": "pinned", **changes}
    return Setup(model=model, **given)


# The simulated device.


def _simulated(setup: Setup, device: str) -> Simulation:
    return simulate(setup, source(setup.model), 2, device=device)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2", {}),
        ("llama-8b", {"checkpoint": True}),
        ("gpt2", {"replicas": 2, "microbatches": 2, "reshard": False}),
        ("attending", {"batch": 2}),
    ],
    ids=["gpt2", "grouped-queries", "replicas", "attention-of-torch"],
)
def test_the_simulated_device_holds_what_the_cpu_holds(
    process: ProcessPoolExecutor, net: str, model: str, changes: dict[str, Any]
) -> None:
    """Step counts are on the host, as on a GPU. In bf16 a CPU's layer norms save less."""
    model = f"{net}:{model}" if model == "attending" else model
    setup = Setup(model=model, world_size=RANKS, sequence=16, precision="fp32", **changes)
    here = _simulated(setup, "cpu")
    there = process.submit(_simulated, setup, DEVICE).result()
    on_cpu = timeline(here.log, here.blocks)
    device = timeline(there.log, there.blocks)
    counts = simulated_host(there).shards
    held = {(line.phase, line.step, line.category): line.bytes for line in on_cpu.lines()}
    for line in device.lines():
        at = line.phase, line.step, line.category
        less = held.pop(at) - line.bytes
        later = at[2] == "optimizer" and at[:2] in (("step", 0), *((p, 1) for p in PHASES))
        assert less == (counts if later else 0), at
    assert not held
    peaks = device.peaks()
    for at, one in on_cpu.peaks().items():
        if at in peaks:  # step counts alone were made in the others
            assert one.total - peaks[at].total in (0, counts), at
    assert 0 < counts == on_cpu.peak().total - device.peak().total
    assert there.log.collectives == here.log.collectives
    assert not there.log.copies


ATTENTIONS: dict[str, Callable[[str], tuple[tuple[torch.Tensor, ...], dict[str, Any]]]] = {}


def _case(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        ATTENTIONS[name] = make
        return make

    return keep


def _heads(device: str, heads: int = 4, positions: int = 6, width: int = 8) -> torch.Tensor:
    return torch.empty(2, heads, positions, width, device=device, requires_grad=True)


@_case("causal")
def _causal(device: str) -> Any:
    return tuple(_heads(device) for _ in range(3)), {"is_causal": True, "scale": 0.5}


@_case("grouped")
def _grouped(device: str) -> Any:
    return (_heads(device), _heads(device, 2), _heads(device, 2)), {"enable_gqa": True}


@_case("other positions")
def _other_positions(device: str) -> Any:
    return (_heads(device), _heads(device, 4, 9), _heads(device, 4, 9)), {}


@_case("boolean mask")
def _boolean(device: str) -> Any:
    mask = torch.empty(6, 6, dtype=torch.bool, device=device)
    return tuple(_heads(device) for _ in range(3)), {"attn_mask": mask}


@_case("mask")
def _mask(device: str) -> Any:
    return tuple(_heads(device) for _ in range(3)), {"attn_mask": torch.empty(6, 6, device=device)}


@_case("mask that trains")
def _trained_mask(device: str) -> Any:
    mask = torch.empty(6, 6, device=device, requires_grad=True)
    return tuple(_heads(device) for _ in range(3)), {"attn_mask": mask}


@_case("three dimensions")
def _three(device: str) -> Any:
    return tuple(_heads(device)[0] for _ in range(3)), {}


@_case("other width of values")
def _other_width(device: str) -> Any:
    return (_heads(device), _heads(device), _heads(device, width=4)), {}


@_case("spread width")
def _spread(device: str) -> Any:
    return tuple(_heads(device).transpose(2, 3) for _ in range(3)), {}


COMPOSED = ("mask that trains", "three dimensions", "other width of values", "spread width")
"""Those for which the CPU has no kernel."""


class Operators(TorchDispatchMode):
    """Names of the operators that run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.seen.append(str(func))
        return result


def _operators(name: str, device: str) -> list[str]:
    if device == DEVICE:
        simulated_device()
    with fake_mode(), Operators() as operators:
        inputs, options = ATTENTIONS[name](device)
        operators.seen.clear()
        if device == DEVICE:
            with fused_attention():
                result = F.scaled_dot_product_attention(*inputs, **options)
        else:
            result = F.scaled_dot_product_attention(*inputs, **options)
        result.sum().backward()
    return operators.seen


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_takes_the_kernel_that_the_cpu_takes(
    process: ProcessPoolExecutor, name: str
) -> None:
    on_cpu, there = _operators(name, "cpu"), process.submit(_operators, name, DEVICE).result()
    assert there == on_cpu
    fused = any("flash_attention_for_cpu" in one for one in on_cpu)
    assert fused == (name not in COMPOSED)


def test_this_process_has_no_accelerator_of_it(net: str) -> None:
    run(offloaded(f"{net}:small"), source(f"{net}:small"))
    assert not hasattr(torch, DEVICE)


@pytest.mark.long
def test_a_process_that_ends_is_an_error_and_the_next_one_works(net: str) -> None:
    with pytest.raises(UsageError, match="ends the process that simulates it"):
        simulate_apart(offloaded(f"{net}:ending"))
    assert simulate_apart(offloaded(f"{net}:small")).log.copies


# What the device and the host hold.


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_the_shards_are_on_the_host(net: str, kind: str) -> None:
    report = analyse(offloaded(f"{net}:small", offload=kind))
    elements = (OUTER + 2 * BLOCK) // RANKS
    assert report.between.held == 16 * elements + report.between.counts
    assert report.between.padding == 0
    assert report.at_end("step", 1) == {"buffer": 8 * 4}  # which stays on the device
    assert report.host is not None
    held = report.host.peak.bytes
    assert held["parameter"] == held["gradient"] == 4 * elements
    assert held["optimizer"] == 8 * elements + report.between.counts
    # A loop over tensors, torch's default on the CPU: two temporaries, and one of the last tensor.
    assert held["other"] == 3 * 4 * 96 * 24 // RANKS
    assert "memory of the host: peak" in render(report)
    assert f"offloaded to {kind} memory" in render(report)


def test_copies_are_those_of_gathers_and_gradients(net: str) -> None:
    """The root stays gathered from the forward on; blocks are gathered twice."""
    for changes, gathers in (({}, 2), ({"reshard": False}, 1)):
        host = analyse(offloaded(f"{net}:small", **changes)).host
        assert host is not None
        assert host.to_device == 4 * (OUTER + gathers * 2 * BLOCK) // RANKS
        assert host.to_host == 4 * (OUTER + 2 * BLOCK) // RANKS


def test_pinned_tensors_take_powers_of_two(net: str) -> None:
    report = analyse(offloaded(f"{net}:small"))
    sizes = [4 * p.numel() // RANKS for p in source(f"{net}:small").build().parameters()]
    blocks = 2 * sum(1 << (size - 1).bit_length() for size in sizes)  # and for gradients
    assert report.host is not None
    assert (report.host.pinned, report.host.rounded) == (blocks, blocks - 2 * sum(sizes))
    assert report.host.taken == report.host.peak.total + report.host.rounded
    pageable = analyse(offloaded(f"{net}:small", offload="pageable")).host
    assert pageable is not None and (pageable.pinned, pageable.rounded) == (0, 0)
    assert pageable.taken == pageable.peak.total == report.host.peak.total


def test_a_free_pinned_block_is_kept_for_its_size() -> None:
    log = Log(moments=[Moment(1, "step", "", "", again=False)])
    log.storages = [Storage(0, place="pinned") for _ in range(4)] + [Storage(0, place="pageable")]
    log.changes = [
        (0, 0, 100),  # 128
        (0, 4, 1000),
        (0, 0, -100),
        (0, 1, 120),  # the same block
        (0, 2, 128),  # a power itself
        (0, 4, -1000),
        (0, 3, 129),  # 256
    ]
    found = simulated_host(Simulation(log, "")).memory
    assert (found.taken, found.pinned, found.rounded) == (1000 + 256, 512, 28 + 127)


def test_whatever_is_accumulated_waits_in_pageable_memory(net: str) -> None:
    """A gradient that is added to another one is copied to pageable memory, and freed."""
    one, two = (analyse(offloaded(f"{net}:small", microbatches=m)).host for m in (1, 2))
    assert one is not None and two is not None
    assert (two.pinned, two.to_host) == (one.pinned, 2 * one.to_host)


@pytest.mark.long
def test_the_extrapolated_is_the_simulated(net: str) -> None:
    model = f"{net}:deep"
    few, all_ = (analyse(offloaded(model), exact=exact) for exact in (False, True))
    assert few.simulated and not all_.simulated
    assert few.host == all_.host and few.peak == all_.peak
    assert few.between == all_.between and few.lines == all_.lines


# Searches, advice, and what is refused.


@pytest.mark.long
@pytest.mark.usefixtures("simulated_once", "nothing_rounded")
def test_it_is_tried_where_nothing_else_fits(net: str) -> None:
    base = Setup(model=f"{net}:small", sequence=8)
    given = Restriction(wrap="block", checkpoint=False, reshard=True)
    with_host = Restriction(wrap="block", checkpoint=False, reshard=True, offload="pinned")
    lowest = min(row.peak.total for row in fit(base, 1 << 30, most_ranks=2, restriction=given).rows)
    reports = [
        fit(base, CUDA_CONTEXT + lowest - 1, most_ranks=2, restriction=kept, exhaustive=exhaustive)
        for kept, exhaustive in ((given, False), (given, True), (with_host, False))
    ]
    for report in reports:
        (row,) = report.rows
        assert (row.implementation, row.offload, row.smallest) == ("fsdp2", "pinned", 1)
        assert "--offload pinned" in row.command and row.host > 0 < row.copied
        assert any("of its host, where the optimizer runs" in line for line in report.advice)
    assert reports[0].rows == reports[1].rows == reports[2].rows


@pytest.mark.usefixtures("simulated_once")
def test_it_is_not_tried_where_something_fits(net: str) -> None:
    base = Setup(model=f"{net}:small", sequence=8)
    for given in (Restriction(), Restriction(offload="none")):
        report = fit(base, 1 << 30, most_ranks=2, restriction=given)
        assert {row.offload for row in report.rows} == {"none"}
        left = [line for line in report.not_tried if line.startswith("CPU offload")]
        assert len(left) == (given.offload is None)


@pytest.mark.long
def test_advice_tries_it(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the peak: of a small model, roundings are most of what is reserved."""
    monkeypatch.setattr("zerocheck.memory.analyse.reserved_of", lambda *_: (None, "small"))
    setup = Setup(model=f"{net}:small", sequence=8, world_size=2)
    peak = analyse(setup).peak.total
    device = analyse(setup, limit=CUDA_CONTEXT + peak - 1).device
    assert device is not None
    (one,) = [one for one in device.tried if one.change == "shards in pinned memory of the host"]
    assert one.fits and one.command.endswith("--offload pinned")
    again = analyse(offloaded(f"{net}:small"), limit=1 << 30).device
    assert again is not None and (again.over, again.stages, again.asks) == (None, {}, None)


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"tensor_parallel": 2}])
def test_advice_leaves_out_what_is_refused(changes: dict[str, Any]) -> None:
    setup = Setup(model="gpt2", sequence=8, world_size=2, **changes)
    with pytest.raises(UsageError, match=r"^--offload (pinned|and)"):
        simulate_apart(replace(setup, offload="pinned"), 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--offload pined", "unknown offload 'pined'; did you mean 'pinned'?"),
        ("--offload pinned --implementation zero3", "zero3 is not simulated with it"),
        ("--offload pinned --implementation fsdp1", "fsdp1 is not simulated with it"),
        ("--offload pinned --tensor-parallel 2", "--offload and --tensor-parallel: give one"),
        ("--offload pageable --optimizer muon", "muon gathers its matrices where its shards are"),
        (
            "--offload pinned --implementation ddp --fit --device-memory 1GiB",
            "ddp is not simulated with it",
        ),
    ],
)
def test_what_is_refused(options: str, words: str) -> None:
    result = CliRunner().invoke(main, ["memory", "gpt2", *options.split()])
    assert (result.exit_code, words in result.output) == (2, True), result.output
