"""Well-known tables from the formulas, next to simulated and measured bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from ..catalogue import BUILT_IN, COMPARED
from ..compat_memory import quiet_profiler
from ..contract.loading import load
from .allocation_tracker import MARK
from .analyse import run
from .formulas import STAGES, recipe, saved_share, total
from .presets import COUNTED, Architecture
from .setup import Setup
from .simulate import STEPS, Simulation, simulate
from .source import ModelSource, source
from .timeline import of_shards
from .transformer import build

RANKS = (1, 4, 16, 64, 256, 1024)
"""Degrees of data parallelism in the paper's Table 1."""

FP32_ELEMENTS, FP32_RANKS = 7_000_000_000, 8
SMALL = Architecture(
    family="gpt",
    blocks=2,
    width=48,
    heads=4,
    key_value_heads=4,
    hidden=192,
    vocabulary=211,
    positions=32,
)
"""Small enough to be run with data; 211 and 48 are not multiples of all numbers of ranks."""
SMALL_RANKS = 3


def render_tables() -> str:
    """Render all tables in Markdown. The simulated ones take a minute or two."""
    return "\n".join(_tables()) + "\n"


def _tables() -> Iterator[str]:
    yield "# Memory per rank: the tables that people know"
    yield ""
    yield (
        "Made by `zerocheck memory --tables`. Formulas: Rajbhandari et al. 2020, section 5. "
        "Persistent bytes only: activations, buckets and gathered units come on top. GB is 10^9."
    )
    yield from ("", "## Table 1 of the ZeRO paper", "")
    yield "Mixed precision with Adam: 2 + 2 + 12 bytes per parameter; in GB."
    yield ""
    yield paper_table()
    yield from ("", "## 7B in fp32 on 8 ranks", "")
    yield (
        "4 + 4 + 8 bytes per parameter. Often 50% and 75% are given as the savings of stages 1 and "
        "2: those are the limits for N to infinity. At N = 8 they are 43.75%, 65.6% and 87.5%."
    )
    yield ""
    yield fp32_table()
    yield from ("", "Simulated, of the shape of Llama 7B (6.74B parameters):", "")
    yield simulated_fp32()
    yield from ("", "## 70B at 16 bytes", "")
    yield (
        f"70B parameters, 16 bytes each: {_gb(total(70_000_000_000, 1, 0))} GB for one "
        "copy. FSDP2 with the shape of Llama 3 70B (70.55B parameters), simulated:"
    )
    yield ""
    yield simulated_shards("llama-70b", (8, 64, 1024))
    yield from ("", "## 7.5B, FSDP2", "")
    yield "A GPT shape of 7.46B parameters; the paper gives none for its 7.5B."
    yield ""
    yield simulated_shards("zero-7.5b", RANKS[1:])
    yield from ("", f"## Formula, simulated and measured: {SMALL.elements():,} parameters", "")
    yield (
        f"On {SMALL_RANKS} ranks, rank 0, in fp32, bytes at the end of the second step: all that "
        "is held. Measured is torch's allocator on the CPU, with data. The formula has no "
        "padding, no step counts and no buckets."
    )
    yield ""
    yield measured_table()


def paper_table() -> str:
    """Table 1: GB per rank of stages 1 to 3, for three sizes."""
    rows = [
        [ranks, *(_gb(total(psi, ranks, stage)) for psi in COUNTED.values() for stage in (1, 2, 3))]
        for ranks in RANKS
    ]
    names = ("P_os", "P_os+g", "P_os+g+p")
    return _table(["N", *(f"{size} {name}" for size in COUNTED for name in names)], rows)


def fp32_table() -> str:
    """Render a table of 7B on 8 ranks in fp32: GB and savings per stage, here and as N grows."""
    fp32 = recipe("fp32")
    limits = ("0%", "50%", "75%", "100%")
    rows = [
        [
            stage,
            _gb(total(FP32_ELEMENTS, FP32_RANKS, stage, fp32)),
            f"{float(saved_share(FP32_RANKS, stage, fp32)):.2%}",
            limits[stage],
        ]
        for stage in STAGES
    ]
    return _table(["stage", "GB", "saved at N = 8", "saved for N to infinity"], rows)


def simulated_fp32() -> str:
    """Llama 7B on 8 ranks in fp32, by stage: the formula and the simulated bytes."""
    fields: Any = {"world_size": FP32_RANKS, "precision": "fp32", "sequence": 16}
    setups = [Setup(model="llama-7b", implementation=name, **fields) for name in COMPARED]
    return _table(HEADERS, [_row_of(setup) for setup in setups])


def simulated_shards(model: str, worlds: tuple[int, ...]) -> str:
    """FSDP2 on several numbers of ranks."""
    return _table(
        HEADERS, [_row_of(Setup(model=model, world_size=ranks, sequence=16)) for ranks in worlds]
    )


COLUMNS = "implementation", "N", "formula", "simulated", "more", "buckets"
HEADERS = [*COLUMNS[:2], *(f"{name}, bytes" for name in COLUMNS[2:])]


def _row_of(setup: Setup) -> list[object]:
    shape = source(setup.model).shape
    assert shape is not None and setup.stage is not None
    held = run(setup, source(setup.model)).timeline.at_end("step", STEPS - 1)
    ours = of_shards(held)
    ideal = total(shape.elements(), setup.world_size, setup.stage, setup.held)
    return [
        setup.implementation,
        setup.world_size,
        f"{float(ideal):,.0f}",
        f"{ours:,}",
        f"{float(ours - ideal):,.0f}",
        f"{held.get('bucket', 0):,}",
    ]


def measured_table(names: Iterable[str] = tuple(BUILT_IN)) -> str:
    """Built-in implementations at small size, by stage: formula, simulated, allocator."""
    given = ModelSource("small", SMALL, lambda: build(SMALL))
    rows: list[list[object]] = []
    stages = {name: load(name).stage or 0 for name in names}
    for name, stage in sorted(stages.items(), key=lambda one: one[1]):
        sizes: Any = {"world_size": SMALL_RANKS, "batch": 2, "sequence": SMALL.positions}
        setup = Setup(model="small", implementation=name, precision="fp32", **sizes)
        held = run(setup, given).timeline.at_end("step", STEPS - 1)
        measured = measure(setup, given).ends[STEPS - 1, "step"]
        ideal = total(SMALL.elements(), SMALL_RANKS, stage, setup.held)
        rows.append(
            [name, stage, f"{float(ideal):,.0f}", f"{sum(held.values()):,}", f"{measured:,}"]
        )
    return _table(["implementation", "stage", "formula", "simulated", "measured"], rows)


def _gb(size: Fraction) -> str:
    """Format four digits, without an exponent."""
    gigabytes = float(size) / 1e9
    return f"{gigabytes:.0f}" if gigabytes >= 1000 else f"{gigabytes:.4g}"


def _table(headers: list[str], rows: list[list[object]]) -> str:
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


@dataclass(frozen=True, slots=True)
class AllocatorBytes:
    """Bytes of the allocator, from the beginning of the run on.

    ends: (step, phase) -> bytes held at the end of it; peaks: the most in it.
    """

    run: Simulation
    ends: dict[tuple[int, str], int]
    peaks: dict[tuple[int, str], int]

    @property
    def peak(self) -> int:
        """Largest number of bytes in the steps."""
        return max(self.peaks[key] for key in self.peaks if key[1] != "built")


def measure(setup: Setup, source: ModelSource, blocks: int | None = None) -> AllocatorBytes:
    """Run the setup with the profiler on. Allocations inside of kernels are included."""
    gc.collect()  # else what an earlier run left may be given back in this one
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = simulate(setup, source, blocks, data=True)
    tree: Any = profiler.profiler.kineto_results.experimental_event_tree()
    ends: dict[tuple[int, str], int] = {}
    peaks: dict[tuple[int, str], int] = {}
    held, key = 0, (-1, "")
    for event in sorted(_flat(tree), key=lambda one: one.start_time_ns):
        if event.name.startswith(MARK):
            _, phase, step = event.name.split()
            key = int(step), phase
            if phase == "built":
                held = 0  # what was there before is not ours
            peaks[key] = max(held, peaks.get(key, 0))  # microbatches begin it again
        elif event.name == "[memory]":
            held += event.extra_fields.alloc_size
        else:
            continue
        if not key[1] or key[1] == "closed":
            continue
        ends[key] = held
        peaks[key] = max(peaks.get(key, 0), held)
    return AllocatorBytes(run, ends, peaks)


def _flat(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)
