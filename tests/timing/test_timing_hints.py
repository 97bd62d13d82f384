"""What figures betray: each pattern at its limit, and just within it."""

from __future__ import annotations

from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Model, Sharding
from zerocheck.timing.pace import Kind, Pace, patterns

MODEL = Model(width=8, inputs=8, outputs=4, blocks=(Block(kind="mlp", hidden=8),) * 2)
CASE = Case(mesh=(2,), model=MODEL, sharding=Sharding(wrap="block", bucket=100))
# Six layers with weight and bias: 5 of 72 elements and the head of 36.
TENSORS, ELEMENTS = 12, 5 * 72 + 36


def pace(
    kind: str, largest: int, *, alone: int = 0, obeys: tuple[str, ...] = (), calls: float = 12
) -> Pace:
    return Pace(steps=4, kinds=(Kind(kind, calls, 32, largest, 0.5),), alone=alone, obeys=obeys)


def test_one_reduction_for_each_parameter() -> None:
    case = replace(CASE, sharding=Sharding(bucket=1 << 20))
    (message,) = patterns(case, pace("all_reduce", 256, alone=TENSORS))
    assert message == (
        "too many small collectives: one reduction for each parameter tensor: 12 of a median of "
        "32 bytes in a step, for 6 layers"
    )
    assert not patterns(case, pace("all_reduce", 256, alone=TENSORS - 1))
    asked = replace(CASE, sharding=Sharding(bucket=2 * ELEMENTS // 11))
    assert not patterns(asked, pace("all_reduce", 256, alone=TENSORS))
    assert not patterns(replace(case, mesh=(1,)), pace("all_reduce", 256, alone=TENSORS))


def test_a_bucket_that_is_larger_than_asked_for() -> None:
    # 396 elements, the largest tensor has 64: buckets of 16 are at least 4.95.
    case = replace(CASE, sharding=Sharding(bucket=16))
    given = pace("reduce_scatter", 800, obeys=("bucket",), calls=4)
    (message,) = patterns(case, given)
    assert message == (
        "a bucket that spikes memory: 4 reductions in a step, the largest of 800 bytes, where "
        "buckets of 16 elements need 5 at least"
    )
    assert not patterns(case, pace("reduce_scatter", 800, obeys=("bucket",), calls=5))
    assert not patterns(case, pace("reduce_scatter", 800, calls=4))
    assert not patterns(case, pace("reduce_scatter", 800, obeys=("bucket", "wrap"), calls=4))
    assert not patterns(case, pace("all_gather", 800, obeys=("bucket",), calls=4))
    spare = replace(case, model=replace(MODEL, blocks=(), unused=True))  # 108 elements are used
    assert not patterns(spare, pace("reduce_scatter", 800, obeys=("bucket",), calls=2))


def test_a_gather_of_the_whole_model() -> None:
    whole = 4 * ELEMENTS
    (message,) = patterns(CASE, pace("all_gather", whole, obeys=("wrap",), calls=2))
    assert message.startswith("a wrapping that gathers too much: one all-gather of 1,584 bytes")
    assert not patterns(CASE, pace("all_gather", whole, obeys=("wrap",), calls=3))
    assert not patterns(CASE, pace("all_gather", whole - 4, obeys=("wrap",), calls=2))
    assert not patterns(CASE, pace("all_gather", whole, calls=2))
    for wrap in ("whole", "size"):
        other = replace(CASE, sharding=replace(CASE.sharding, wrap=wrap))
        assert not patterns(other, pace("all_gather", whole, obeys=("wrap",), calls=2))
    no_blocks = replace(CASE, model=replace(MODEL, blocks=()))
    assert not patterns(no_blocks, pace("all_gather", whole, obeys=("wrap",), calls=1))


def test_nothing_is_said_of_what_was_not_timed() -> None:
    assert not patterns(CASE, Pace(broken="rank 1 died"))
