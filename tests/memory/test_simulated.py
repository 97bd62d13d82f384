"""What simulations say of implementations, against arithmetic that is done here."""

from __future__ import annotations

import time
from functools import cache

import pytest

from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse
from zerocheck.memory.presets import PRESETS
from zerocheck.memory.result import MemoryReport
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source


def report(model: str = "small_models:small", name: str = "fsdp2", **more: object) -> MemoryReport:
    options = {"world_size": 4, "precision": "fp32", "batch": 3, "sequence": 29, **more}
    return analysed(Setup(model=model, implementation=name, **options))  # type: ignore[arg-type]


analysed = cache(analyse)


def sharded_bytes(model: str, ranks: int) -> int:
    """Parameter, gradient and two moments in fp32 of FSDP2's first rank, and the step counts."""
    found = source(model).build()
    parameters = list(found.parameters())
    elements = sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in parameters)
    return 16 * elements + 4 * len(parameters)


@pytest.mark.every(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 200])
def test_fsdp2_between_steps(ranks: int) -> None:
    found = report(world_size=ranks).between
    assert found.held == sharded_bytes("small_models:small", ranks)
    assert found.formula is not None and found.padding is not None
    assert found.held == pytest.approx(found.formula + found.padding + found.counts, abs=1e-6)
    assert found.counts == 4 * 15


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["fsdp2", "zero2", "ddp"])
def test_sgd_keeps_its_momentum_alone(name: str) -> None:
    adamw, heavy, plain = (
        report(name=name, **given).between
        for given in ({}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.0})
    )
    assert heavy.counts == plain.counts == 0
    assert adamw.held - adamw.counts - heavy.held == heavy.held - plain.held > 0
    for found in (heavy, plain):
        assert found.formula is not None and found.padding is not None
        assert found.held == pytest.approx(found.formula + found.padding, abs=1e-6)


@pytest.mark.long
def test_llama_70b_on_1024_ranks() -> None:
    """Processor time, since machines have other work too."""
    begun = time.process_time()
    found = analyse(Setup(model="llama-70b", world_size=1024, sequence=4096))
    assert time.process_time() - begun < 60
    assert found.simulated and found.elements == PRESETS["llama-70b"].published
    assert found.between.held == sharded_bytes("llama-70b", 1024)
    assert found.between.formula == 16 * found.elements / 1024
    # Rows are not multiples of 1024 in the embedding and the head only: 125.25 of them.
    excess = 2 * 16 * 8192 * (126 - 125.25)
    assert found.between.padding == excess


def test_the_last_rank_of_fsdp2_holds_less_of_the_parameters() -> None:
    """37 rows on 4 ranks are 10, 10, 10, 7; 101 are 26, 26, 26, 23."""
    first, last = report(rank=0), report(rank=3)
    assert last.between.held < first.between.held
    assert last.between.padding is not None and last.between.padding < 0


@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "moments"),
    [
        ("ddp", 1, 1, 1),
        ("zero1", 1, 1, 4),
        ("zero2", 1, 4, 4),
        ("zero3", 4, 4, 4),
        ("fsdp1", 4, 4, 4),
    ],
)
def test_what_is_cut(name: str, parameter: int, gradient: int, moments: int) -> None:
    """Up to padding, of which a rank has more or less than others: 64 bytes per parameter, and to
    a multiple of the ranks."""
    found = report(name=name)
    held = found.at_end("step", 1)
    for kind, bytes_each, cut in (
        ("parameter", 4, parameter),
        ("gradient", 4, gradient),
        ("optimizer", 8, moments),
    ):
        ideal = bytes_each * found.elements / cut
        assert abs(held[kind] - ideal) <= found.tensors * 64 + 64, kind  # type: ignore[index]


def test_copies_and_communication() -> None:
    """Of replicated states there are N copies; step counts are a few bytes more."""
    ddp, fsdp2 = report(name="ddp"), report()
    assert 4 <= ddp.between.copies < 4.01 and 1 <= fsdp2.between.copies < 1.1
    assert ddp.between.communicated == 2 * ddp.elements
    assert fsdp2.between.communicated == 3 * ddp.elements


def test_ddp_keeps_its_buckets() -> None:
    found = report(name="ddp")
    assert found.between.bucket == 4 * found.elements


def test_fsdp2_gathers_two_units_and_the_root_at_most() -> None:
    """In fp32: a unit is in one buffer when it arrives, and then in its parameters."""
    found = report("small_models:deep")
    block = 4 * (2 * 4 * 37 * 37 + 4 * 37 + 37)
    root = 4 * (2 * 101 * 37 + 101)
    most = max(row.held.bytes.get("gathered", 0) for row in found.rows)
    padding = 1.2  # 37 rows are 10 for each of 4 ranks
    assert block + root < most <= padding * (root + 2 * (2 * block))


@pytest.mark.long
def test_checkpointing_lowers_the_activations_and_nothing_that_stays() -> None:
    plain, again = report("small_models:deep"), report("small_models:deep", checkpoint=True)
    assert again.between == plain.between
    end = again.at_end("forward", 1), plain.at_end("forward", 1)
    assert end[0]["activation"] < end[1]["activation"] / 4
    for kind in ("parameter", "optimizer", "gathered"):
        assert end[0][kind] == end[1][kind]  # type: ignore[index]
    assert again.peak.total < plain.peak.total


def test_activations_are_those_of_the_model_in_every_stage() -> None:
    """At the end of the forward: in fp32, where nothing is cast."""
    kept = {
        name: report(name=name).at_end("forward", 1)["activation"]
        for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
    }
    assert len(set(kept.values())) == 1, kept


def test_units_are_gathered_in_bf16_in_mixed_precision() -> None:
    """The root stays gathered after the forward; weights, gradients and states are in fp32."""
    mixed, fp32 = report(precision="mixed"), report()
    assert 2 * mixed.at_end("forward", 1)["gathered"] == fp32.at_end("forward", 1)["gathered"]
    assert mixed.between.held == fp32.between.held


def test_finer_units_gather_less() -> None:
    sizes = [
        max(row.held.bytes.get("gathered", 0) for row in report(wrap=wrap).rows)
        for wrap in ("whole", "block", "layer")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_the_last_step_is_as_the_one_before_once_the_moments_are_there() -> None:
    found = report(name="zero2")
    assert found.at_end("step", 0)["optimizer"] == found.at_end("step", 1)["optimizer"]
    assert sum(found.at_end("backward", 0).values()) < sum(found.at_end("backward", 1).values())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2-midium", "did you mean 'gpt2-medium'"),
        ("models.py", "names a file"),
        ("small_models:smal", "has no 'smal'; did you mean 'small'"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("small_models:number", "is of type int"),
        ("small_models:fails", "fails on the meta device: ValueError: no such weights"),
        ("small_models:on_cpu", "puts weight on cpu"),
        ("small_models:no_module", "returns str"),
        (":make", "is no model"),
    ],
)
def test_models_that_are_refused(model: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        report(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "--world-size 0"),
        ({"world_size": 1 << 20}, "at most"),
        ({"batch": 0}, "--batch 0"),
        ({"rank": 4}, "--rank 4"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"wrap": "blocks"}, "did you mean 'block'"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        report(**options)  # type: ignore[arg-type]
