"""The row to take and the reasons, from rows that are made by hand."""

from __future__ import annotations

from msgspec.structs import replace

from zerocheck.memory.fit.recommend import advise_on, by_cost, taken
from zerocheck.memory.fit.result import FitRow, PaperTime, Unfit
from zerocheck.memory.timeline import HeldBytes
from zerocheck.memory.verdict import CUDA_CONTEXT, MemoryVerdict, Reserved, judge_memory

GIB = 2**30
LIMIT = 10 * GIB + CUDA_CONTEXT
PEAK = HeldBytes(
    step=1, phase="step", module="", operator="add", recomputed=False, asked=0,
    bytes={"optimizer": 6 * GIB, "activation": 2 * GIB},
)  # fmt: skip


def row(name: str, stage: int | None, **more: object) -> FitRow:
    fields = {
        "wrap": "block", "units": stage == 3, "reshard": True, "checkpoint_activations": False,
        "microbatches": 1, "batch": 1, "replicas": 1, "tensor_parallel": 1, "offload": "none",
        "smallest": 8, "ranks": 8, "peak": PEAK, "sent": 8e9, "communicated": None, "calls": 10,
        "host": 0, "copied": 0,
        "recomputed": 0.0, "command": name, **more,
    }  # fmt: skip
    return FitRow(implementation=name, stage=stage, **fields)  # type: ignore[arg-type]


def unfit(name: str, stage: int, needs: dict[str, int], *, by_formula: bool = False) -> Unfit:
    return Unfit(
        implementation=name, stage=stage, wrap="block", units=stage == 3, reshard=True,
        checkpoint_activations=False, microbatches=1, batch=1, replicas=1, tensor_parallel=1,
        offload="none",
        ranks=8, by_formula=by_formula, needs=needs, total=sum(needs.values()),
    )  # fmt: skip


def advice(*rows: FitRow, no: tuple[Unfit, ...] = (), given: bool = True) -> list[str]:
    ordered = sorted(rows, key=lambda one: by_cost(one, given_ranks=given))
    place = next((at for at, one in enumerate(ordered) if one.reserved is not None), None)
    place = taken(ordered) if place is None else place
    return list(advise_on(ordered, place, no, verdict(ordered[place]) if ordered else None))


def verdict(one: FitRow) -> MemoryVerdict:
    return judge_memory(LIMIT, one.peak.total, one.reserved, "not looked at")


def test_what_fits_as_it_is_is_not_sharded() -> None:
    ddp, fsdp2 = row("ddp", 0, sent=9e9), row("fsdp2", 3, sent=7e9, calls=90)
    first, room, unknown, _, less = advice(ddp, fsdp2)
    assert first == "ddp fits on 8 ranks: take it; sharding buys nothing here"
    assert room.startswith(
        "its peak of 8.000 GiB is 74% of the device, most of it optimizer states"
    )
    assert unknown == (
        "it fits into 10.750 GiB by its peak of 8.000 GiB; what the allocator reserves is not "
        "known (not looked at)"
    )
    assert less == (
        "fsdp2 would send 7 GB in a step instead of 9 GB, in 90 collectives instead of 10"
    )
    assert len(advice(ddp, row("fsdp2", 3, sent=9.1e9))) == 4


def test_ddp_is_not_taken_on_more_ranks_or_with_recomputation() -> None:
    fsdp2 = row("fsdp2", 3, smallest=2, ranks=2)
    assert advice(row("ddp", 0), fsdp2, given=False)[0].startswith("take fsdp2 on 2 ranks")
    again = row("ddp", 0, checkpoint_activations=True, recomputed=0.9)
    assert advice(again, row("fsdp2", 3))[0].startswith("take fsdp2 on 8 ranks")


def reserving(default: float, expandable: float) -> Reserved:
    return Reserved(
        allocated=8 * GIB, default=int(default * GIB), expandable=int(expandable * GIB),
        building=int(default * GIB),
    )  # fmt: skip


def test_what_the_allocator_reserves_stands_next_to_the_peak() -> None:
    """It may take more than the device has, though the peak fits; a setting may help."""
    _, _, fits, context = advice(row("fsdp2", 3, reserved=reserving(9, 8.5)))
    assert fits == "it fits into 10.750 GiB: the caching allocator reserves 9.000 GiB"
    assert context.startswith("counted next to it: 0.75 GiB of CUDA context, as measured on an")
    _, _, helped, _ = advice(row("fsdp2", 3, reserved=reserving(11, 9)))
    assert helped == (
        "it fits into 10.750 GiB only with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the "
        "caching allocator reserves 9.000 GiB with it, and 11.000 GiB without"
    )


def test_a_row_that_is_passed_over_says_why() -> None:
    over = row("fsdp2", 3, ranks=4, smallest=4, reserved=reserving(12, 11))
    fits = row("fsdp2", 3, reserved=reserving(9, 9))
    found = list(advise_on([fits], 0, (), verdict(fits), [over]))
    assert found[0].startswith("take fsdp2 on 8 ranks") and found[2] == (
        "fsdp2 on 4 ranks would fit by its peak of 8.000 GiB, but torch's caching allocator would "
        "reserve 11.000 GiB"
    )
    nothing = list(advise_on([], 0, (), None, [over]))
    assert nothing == ["nothing fits", found[2]]


def test_on_paper_the_fastest_is_taken() -> None:
    slow = PaperTime(step=2.0, compute=1.0, link=1.0, exposed=1.0)
    fast = replace(slow, step=1.5, exposed=0.5)
    ddp, fsdp2 = row("ddp", 0, paper=slow), row("fsdp2", 3, paper=fast, sent=9e9)
    found = advice(ddp, fsdp2)
    assert found[0] == (
        "take fsdp2 on 8 ranks: nothing needs to be sharded; of what fits it takes the least time "
        "on paper"
    )
    assert found[4].startswith("on paper a step takes 1.5 s at least: 1 s of compute, and 500 ms")
    assert found[5] == "ddp fits from 8 ranks, and sends 8 GB in a step, which takes 2 s on paper"
    equal = [row("ddp", 0, paper=fast), row("zero2", 2, paper=fast, sent=7e9)]
    equal.sort(key=lambda one: by_cost(one, given_ranks=True))
    assert equal[taken(equal)].implementation == "ddp"


def test_the_reason_is_what_the_lowest_stage_that_fits_shards() -> None:
    zero1, zero2, fsdp2 = row("zero1", 1), row("zero2", 2, sent=7e9), row("fsdp2", 3, sent=6e9)
    no = (unfit("ddp", 0, {"optimizer states": 11 * GIB}),)
    assert "8 ranks: parameters, gradients and" in advice(fsdp2, no=no)[0]
    assert advice(zero2, no=no)[0].endswith(
        ": gradients and optimizer states are too much for each rank"
    )
    assert (
        ": optimizer states are too much for each rank; of what" in advice(zero1, fsdp2, no=no)[0]
    )


def test_what_was_not_tried_is_not_too_much() -> None:
    """The user may ask for one implementation."""
    assert advice(row("fsdp2", 3))[0] == (
        "take fsdp2 on 8 ranks: of what fits it recomputes and sends the least"
    )


def test_what_keeps_a_lower_stage_out() -> None:
    needs = {"parameters": 9 * GIB, "gradients": 8 * GIB, "optimizer states": GIB}
    found = advice(row("fsdp2", 3), no=(unfit("zero2", 2, needs, by_formula=True),))
    assert found[-1] == (
        "zero2 does not fit: by the formula a rank holds at least 18.000 GiB on 8 ranks, most of "
        "it parameters 9.000 GiB and gradients 8.000 GiB"
    )


def test_without_recomputation() -> None:
    again = row("fsdp2", 3, smallest=4, ranks=4, checkpoint_activations=True, recomputed=0.9)
    found = advice(again, row("fsdp2", 3), given=False)
    assert found[-1] == "without recomputation: fsdp2, from 8 ranks"
    assert advice(again, given=False)[-1] == "without recomputation nothing fits"


def test_nothing_fits() -> None:
    cases = {
        "optimizer": "more ranks are needed",
        "gathered": "over more ranks (--tensor-parallel)",
        "activation": "a shorter --sequence",
    }
    for category, words in cases.items():
        found = advice(no=(unfit("fsdp2", 3, {category: 20 * GIB, "other": GIB}),))
        assert found[0] == "nothing fits on 8 ranks"
        assert words in found[-1], category
    formula = {"parameters": 20 * GIB, "gradients": GIB}
    assert "more ranks" in advice(no=(unfit("fsdp2", 3, formula, by_formula=True),))[-1]


def test_one_rank_shards_nothing() -> None:
    alone = row("fsdp2", 3, smallest=1, ranks=1)
    said = advice(alone, no=(unfit("ddp", 0, {"optimizer": 11 * GIB}),), given=False)
    assert said[0] == "take fsdp2 on 1 rank: of what fits it recomputes and sends the least"
