"""DeepSpeed's stages, simulated: what torch's allocator counts, and what ranks hold in runs."""

from __future__ import annotations

import pytest
from slices import paired
from test_allocator import both, check_ends, check_peaks, peaks, setup

from zerocheck.adapters.deepspeed.alone import BUCKET
from zerocheck.contract.loading import load
from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.fit.bounds import lower_bound, model_bytes
from zerocheck.memory.setup import PrecisionKind
from zerocheck.memory.source import source
from zerocheck.protocol.layout import Category

NAMES = ("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3")
UNSEEN = 16
"""Bytes of scalars that the optimizer step makes unseen."""
COUNTED_ELSEWHERE = 9
"""Bytes of the norm of the last step and of stage 3's flag, by category: in runs they are told
apart by who holds them."""


@pytest.mark.every(3)
@pytest.mark.parametrize("more", [{}, {"microbatches": 3}, {"rank": 3}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_to_the_byte(name: str, more: dict[str, object]) -> None:
    line, measured = both(setup(name, **more))
    check_ends(line, measured)
    check_peaks(line, measured)
    for step in (0, 1):
        assert 0 <= measured.peaks[step, "step"] - peaks(line)[step, "step"] <= UNSEEN


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_deepspeed_holds_what_the_allocator_counts(name: str) -> None:
    check_ends(*both(setup(name, precision="mixed")))


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "precision"), paired(NAMES, ("fp32", "mixed")))
def test_deepspeed_holds_what_its_layout_says(name: str, precision: PrecisionKind) -> None:
    """The layout is held against ranks of real runs, by the obligation `persistent`."""
    given = setup(name, precision=precision, world_size=3)
    report = analyse(given)
    case = given.case(report.blocks)
    layout = load(name).layout(source(given.model).build(), case, 0)
    assert layout is not None
    told: dict[Category, int] = {}
    for line in layout.lines:
        if (line.phase, line.step) == ("step", 1):
            told[line.category] = told.get(line.category, 0) + line.bytes
    held = report.at_end("step", 1)
    for category in ("parameter", "optimizer"):
        assert held.get(category, 0) == told[category], category
    assert 0 <= told.get("gradient", 0) - held.get("gradient", 0) <= COUNTED_ELSEWHERE
    assert abs(sum(held.values()) - sum(told.values())) <= COUNTED_ELSEWHERE


@pytest.mark.parametrize(
    ("name", "precision", "words", "released"),
    [
        ("deepspeed0", "mixed", "16 Psi", 2),
        ("deepspeed1", "mixed", "4 Psi + 12 Psi/N", 2),
        ("deepspeed2", "mixed", "2 Psi + 14 Psi/N", 1),
        ("deepspeed3", "mixed", "16 Psi/N", 0),
        ("deepspeed0", "fp32", "16 Psi", 4),
        ("deepspeed2", "fp32", "4 Psi + 16 Psi/N", 2),
    ],
)
def test_deepspeed_holds_the_formula_of_its_stage(
    name: str, precision: PrecisionKind, words: str, released: int
) -> None:
    """bf16 weights and gradients with fp32 masters, as in the paper. The step lets go of gradients:
    of two ranks each has these bytes of an element. Stage 3 keeps them, and small parameters."""
    between = analyse(setup(name, precision=precision, world_size=2)).between
    elements = sum(one.numel() for one in source("small_models:small").build().parameters())
    assert between.words == words and between.paper is None
    assert between.released == released * elements
    assert between.padding is not None
    if name != "deepspeed3":
        assert 0 <= between.padding <= 4 * 12  # a group is filled up to 2 W elements


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "precision"), paired(NAMES, ("fp32", "mixed")))
def test_no_peak_of_deepspeed_is_under_its_bound(name: str, precision: PrecisionKind) -> None:
    model = source("small_models:small")
    for ranks in (1, 2, 5):
        given = setup(name, precision=precision, world_size=ranks, microbatches=2)
        bound = sum(lower_bound(given, model_bytes(model.build())).values())
        assert 0 < bound <= run(given, model).timeline.peak().total, ranks


def test_stage_3_keeps_its_bucket() -> None:
    held = analyse(setup("deepspeed3", precision="mixed")).at_end("step", 1)
    assert held["bucket"] == 2 * BUCKET


@pytest.mark.parametrize(
    ("name", "times"), [("deepspeed0", 2), ("deepspeed1", 3), ("deepspeed2", 3)]
)
def test_stages_1_and_2_reduce_whole_buckets(name: str, times: int) -> None:
    """Of W ranks each sends (W - 1)/W of 2 Psi in an all-reduce and of Psi in an all-gather; a
    reduce-scatter would be Psi less (`use_multi_rank_bucket_allreduce` is on by default)."""
    given = setup(name, precision="mixed", world_size=4)
    model = source(given.model)
    elements = sum(one.numel() for one in model.build().parameters())
    sent = float(run(given, model).traffic.sent)
    assert sent == pytest.approx(times * 2 * elements * 3 / 4, rel=1e-3)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES[1:])
def test_deepspeed_offloads_masters_moments_and_gradients(name: str) -> None:
    """Each rank has its share of 4 + 8 + 4 bytes on the host. On the device stages 1 and 2 keep the
    bf16 weights, and room for the largest gradient; stage 3 its bucket, and what is small."""
    report = analyse(setup(name, precision="mixed", offload="pinned"))
    sizes = [one.numel() for one in source("small_models:small").build().parameters()]
    assert report.host is not None and report.between.padding is not None
    shared = "18 Psi/N" if name == "deepspeed3" else "2 Psi + 16 Psi/N"
    assert report.between.words == shared
    host, device = report.host.peak.bytes, report.at_end("step", 1)
    assert host["optimizer"] == 2 * host["gradient"] + report.between.counts
    if name == "deepspeed3":
        assert device["bucket"] == 2 * BUCKET
        return
    assert 0 <= report.between.padding <= 4 * 18
    assert host["parameter"] == host["gradient"] and "gradient" not in device
    assert device["other"] >= 2 * max(sizes) and device["other"] < 2 * max(sizes) + 100


def test_stage_0_offloads_nothing() -> None:
    with pytest.raises(UsageError, match="deepspeed0 is not simulated with it"):
        analyse(setup("deepspeed0", offload="pinned"))
