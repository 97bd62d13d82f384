"""What a rank may hold by its stage and its shards alone, from shards written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from zerocheck.case.schema import Case, Model, Optimizer, Training
from zerocheck.judge import placement
from zerocheck.judge.obligations import persistent
from zerocheck.protocol.layout import Category, Layout, Line
from zerocheck.protocol.measurements import Exposed, Held, Measured

MODEL = Model(inputs=9, width=10, outputs=8)
CASE = Case(mesh=(2,), model=MODEL, training=Training(steps=2))
SIZES = {"stem.weight": 90, "stem.bias": 10, "head.weight": 80, "head.bias": 8}
ALL = sum(SIZES.values())
STATES = ("exp_avg", "exp_avg_sq")
OF_ROLE: dict[str, Category] = {"parameter": "parameter", "gradient": "gradient"}


def rank(
    stage: int | None,
    parts: dict[str, dict[str, int]],
    *more: Held,
    storages: dict[str, int] | None = None,
) -> Measured:
    """A rank with these elements by role and name, each in a storage of its own, in fp32.

    storages: elements of storages that are larger than the shard, by role.
    """
    exposed, held = [], [*more]
    for number, (role, name, size) in enumerate(
        (role, name, size) for role, of in parts.items() for name, size in of.items()
    ):
        storage = 4 * max(size, (storages or {}).get(role, 0))
        phase = "backward" if role == "gradient" else "step"
        exposed.append(Exposed(phase, role, name, size, 4 * size, storage, number))
        held.append(Held(OF_ROLE.get(role, "optimizer"), storage, name, exposed=True))
    lines = (Line("step", 1, "parameter", 4, "w"),)
    return Measured(lines=lines, steps=2, stage=stage, exposed=tuple(exposed), held=tuple(held))


def halves(**sizes: int) -> dict[str, int]:
    """Half of each tensor, or so many elements of some."""
    return {name: sizes.get(name.replace(".", "_"), size // 2) for name, size in SIZES.items()}


def parts(stage: int, share: dict[str, int]) -> dict[str, dict[str, int]]:
    """What a rank of this stage holds, with this share of what is sharded."""
    return {
        "parameter": share if stage == 3 else SIZES,
        "gradient": share if stage > 1 else SIZES,
        **dict.fromkeys(STATES, share if stage else SIZES),
    }


def causes(case: Case, ranks: Sequence[Measured]) -> set[str]:
    violation = placement.check(case, ranks)
    parts = () if violation is None else violation.parts or (violation,)
    return {cause for part in parts for cause in part.causes}


@pytest.mark.parametrize("stage", range(4))
def test_shares_hold(stage: int) -> None:
    ranks = [rank(stage, parts(stage, halves())) for _ in range(2)]
    assert placement.check(CASE, ranks) is None
    checked = persistent.check(CASE, ranks)
    assert checked.exercised and checked.violation is None and not checked.vacuous


@pytest.mark.parametrize(
    ("stage", "role", "cause"),
    [
        (1, "exp_avg", "optimizer state replicated"),
        (2, "gradient", "whole gradients kept"),
        (3, "parameter", "gathered parameters kept"),
    ],
)
def test_shards_that_are_views_of_whole_buffers(stage: int, role: str, cause: str) -> None:
    """A storage of all elements behind each of four shards."""
    bad = rank(stage, parts(stage, halves()), storages={role: ALL})
    ranks = [rank(stage, parts(stage, halves())), bad]
    violation = placement.check(CASE, ranks)
    assert violation is not None and violation.ranks == (1,)
    assert causes(CASE, ranks) == {cause}
    assert "share" in violation.explanation and violation.step == 0
    # At the stage below it need not be shared out.
    below = [rank(stage - 1, parts(stage - 1, halves()), storages={role: ALL}) for _ in range(2)]
    assert cause not in causes(CASE, below)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_every_rank_exposes_whole_is_no_share(stage: int) -> None:
    """As of an optimizer over whole parameters, though a stage is declared."""
    ranks = [rank(stage, parts(0, SIZES)) for _ in range(2)]
    assert "optimizer state replicated" in causes(CASE, ranks)


def hidden(share: dict[str, int], *, extra: int = 0) -> Measured:
    """A rank of stage 1 whose optimizer states no shard shows; extra: bytes that it has beside."""
    states = [
        Held("optimizer", 4 * n, f"AdamW['{s}']", exposed=False)
        for s in STATES
        for n in share.values()
    ]
    roles = {"parameter": SIZES, "gradient": SIZES}
    return rank(
        1, roles, *states, *([Held("optimizer", extra, "AdamW", exposed=False)] if extra else [])
    )


def test_hidden_states_are_compared_over_all_ranks() -> None:
    """Which rank owns what is not known, so ranks may hold anything that adds up to one copy."""
    first = {"stem.weight": 90, "stem.bias": 10}
    second = {"head.weight": 80, "head.bias": 8}
    assert placement.check(CASE, [hidden(first), hidden(second)]) is None
    assert placement.check(CASE, [hidden(SIZES), hidden({})]) is None
    padding = 2 * 4 * len(SIZES)  # of a buffer for each tensor, on two ranks
    assert placement.check(CASE, [hidden(first), hidden(second, extra=padding)]) is None
    over = [hidden(first), hidden(second, extra=padding + 4)]
    assert causes(CASE, over) == {"optimizer state replicated"}
    violation = placement.check(CASE, [hidden(SIZES)] * 2)
    assert violation is not None and violation.ranks == (0, 1)
    assert "all ranks together hold" in violation.explanation


def test_uneven_shares_hold_where_a_rank_exposes_them() -> None:
    """Whole tensors to each rank; and rows, of which the last rank holds padding."""
    first = {"stem.weight": 90, "stem.bias": 10}
    second = {"head.weight": 80, "head.bias": 8}
    assert placement.check(CASE, [rank(1, parts(1, one)) for one in (first, second)]) is None
    case = replace(CASE, mesh=(3,))
    rows = {"stem.weight": 36, "stem.bias": 4, "head.weight": 30, "head.bias": 3}
    last = {"stem.weight": 18, "stem.bias": 2, "head.weight": 20, "head.bias": 2}
    padded = rank(3, parts(3, last))
    padded = replace(padded, held=tuple(replace(h, bytes=4 * rows[h.holder]) for h in padded.held))
    ranks = [rank(3, parts(3, rows)), rank(3, parts(3, rows)), padded]
    assert placement.check(case, ranks) is None
    more = replace(padded, held=(*padded.held, Held("gathered", 12, "kept", exposed=False)))
    assert causes(case, [*ranks[:2], more]) == {"gathered parameters kept"}


def test_a_chunk_may_be_padding_alone() -> None:
    """Of a unit of 40 elements in chunks of 70 the last two ranks have nothing but padding."""
    case = replace(CASE, mesh=(3,), model=Model(inputs=1, width=1, outputs=40, head_bias=False))
    names = {"stem.weight": 1, "stem.bias": 1}
    ranks = []
    for shown in (40, 0, 0):
        shares = {"head.weight": shown} if shown else {}
        mine = {**names, **shares} if shown else {}
        parts = {"parameter": mine, "padding": {"head": 70 - shown}}
        one = rank(3, {**parts, "gradient": shares})
        exposed = tuple(
            replace(shard, storage=280, number=9) if shard.name.startswith("head") else shard
            for shard in one.exposed
        )
        held = (Held("gradient", 280, "head", exposed=bool(shown)),)
        ranks.append(replace(one, exposed=exposed, held=held))
    assert placement.check(case, ranks) is None


def test_what_is_declared_to_stay_gathered_may_be_whole() -> None:
    share = halves(stem_bias=10, head_bias=8)  # whole on both ranks
    ranks = [rank(3, {**parts(3, halves()), "parameter": share}) for _ in range(2)]
    whole = [Held("gathered", 4 * 90, "stem.weight", exposed=False)]
    more = [replace(one, held=(*one.held, *whole)) for one in ranks]
    assert causes(CASE, more) == {"gathered parameters kept"}
    stays = ("stem.weight", "stem.bias", "head.bias")
    assert placement.check(CASE, [replace(one, stays_gathered=stays) for one in more]) is None


def test_flat_buffers_may_be_padded_once_for_each_tensor() -> None:
    """Of T tensors each in a buffer of its own, on N ranks: T (N - 1) / N elements in all."""
    case = replace(CASE, mesh=(5,))
    share = {name: -(-size // 5) for name, size in SIZES.items()}
    ranks = [rank(2, parts(2, share)) for _ in range(5)]
    hidden = [replace(one, exposed=_with(one, gradient=1)) for one in ranks]
    # 40 elements: of 18, 2, 16 and 2 those of biases are numbers, which do not count.
    for size, found in ((24, set()), (28, {"whole gradients kept"})):
        extra = Held("gradient", size, "g", exposed=False)
        more = [replace(one, held=(*one.held, extra)) for one in hidden]
        assert causes(case, more) == found


def _with(one: Measured, **elements: int) -> tuple[Exposed, ...]:
    """The shards, of which those of a role expose so few elements."""
    return tuple(
        replace(e, elements=elements[e.role], bytes=4 * elements[e.role])
        if e.role in elements
        else e
        for e in one.exposed
    )


@pytest.mark.parametrize(
    "sizes", [tuple(4 * size for size in SIZES.values()), (4 * ALL,)], ids=["each", "flat"]
)
@pytest.mark.parametrize("stage", [0, 1, 3, None])
def test_a_copy_is_known_by_its_sizes(sizes: tuple[int, ...], stage: int | None) -> None:
    kept = [Held("other", size, f"backup[{n}]", exposed=False) for n, size in enumerate(sizes)]
    right = rank(stage, parts(stage or 0, halves() if stage else SIZES))
    bad = replace(right, held=(*right.held, *kept))
    violation = placement.check(CASE, [right, bad])
    assert violation is not None and violation.ranks == (1,)
    assert violation.causes == ("parameters held twice",) and "backup[0]" in violation.explanation
    almost = replace(right, held=(*right.held, *kept[1:], Held("other", 4, "x", exposed=False)))
    assert placement.check(CASE, [right, almost]) is None
    bucket = tuple(replace(one, category="bucket") for one in kept)
    assert placement.check(CASE, [right, replace(right, held=(*right.held, *bucket))]) is None


@pytest.mark.parametrize("role", ["gradient", *STATES])
def test_who_hides_states_or_gradients_is_asked_for_no_copies(role: str) -> None:
    hidden = {role} if role == "gradient" else set(STATES)
    seen = {name: of for name, of in parts(0, SIZES).items() if name not in hidden}
    kept = [Held("other", 4 * size, name, exposed=False) for name, size in SIZES.items()]
    assert placement.check(CASE, [rank(0, seen, *kept) for _ in range(2)]) is None


def test_nothing_is_held_against_what_is_not_declared() -> None:
    """Without a stage it is not exercised; a copy is found all the same."""
    ranks = [rank(None, parts(1, halves())) for _ in range(2)]
    checked = persistent.check(CASE, ranks)
    assert not checked.exercised and checked.violation is None
    kept = [Held("other", 4 * size, name, exposed=False) for name, size in SIZES.items()]
    bad = [replace(one, held=(*one.held, *kept)) for one in ranks]
    assert persistent.check(CASE, bad).violation is not None


def test_a_shard_of_padding_is_no_copy() -> None:
    """The last rank has no element of its partition, which is as large as all parameters."""
    model = replace(MODEL, frozen=("*.bias", "stem.*"), inputs=1, width=4, outputs=2)
    case = replace(CASE, mesh=(3,), model=model)
    whole = {"stem.weight": 4, "stem.bias": 4, "head.bias": 2, "head.weight": 8}
    sharded = {"gradient": {"head.weight": 8}, **{role: {"head.weight": 8} for role in STATES}}
    first = rank(None, {"parameter": whole, **sharded})
    last = replace(first, held=tuple(o for o in first.held if o.holder != "head.weight"))
    beside = Held("other", 32, "partition", exposed=False)
    last = replace(last, held=(*last.held, beside))
    assert persistent.check(case, [first, first, last]).violation is None
    bad = [replace(one, held=(*one.held, beside)) for one in (first, first, last)]
    assert persistent.check(case, bad).violation is not None


def test_a_layout_says_more() -> None:
    layout = Layout(lines=(Line("step", 0, "parameter", 4),))
    bad = rank(1, parts(0, SIZES))
    ranks = [replace(bad, layout=layout) for _ in range(2)]
    checked = persistent.check(CASE, ranks)
    assert checked.exercised and checked.violation is None


def test_one_rank_and_one_shard_share_nothing_out() -> None:
    one = replace(CASE, mesh=(1,))
    assert persistent.check(one, [rank(3, parts(0, SIZES))]).vacuous
    assert placement.check(replace(CASE, mesh=(2, 1)), [rank(3, parts(0, SIZES))] * 2) is None


def test_without_states_sgd_shares_out_no_states() -> None:
    case = replace(CASE, optimizer=Optimizer(kind="sgd"))
    seen = {"parameter": SIZES, "gradient": SIZES}
    assert placement.check(case, [rank(1, seen) for _ in range(2)]) is None
