"""Order of the rows by cost, the row to take, and the reasons. Imports no torch.

Recomputation counts before bytes on the link: it is compute and hides behind nothing, where
communication may hide behind compute. Where the user gives the speeds of both, the step time on
paper weighs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...sizes import binary, decimal
from ..setup import AXES
from ..verdict import MemoryVerdict
from ..verdict import words_of as verdict_words
from .result import FitRow, PaperTime, Unfit

NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered parameters",
    "bucket": "buckets",
    "activation": "activations",
    "other": "temporaries",
}
"""Categories in the plural; the formulas' names are plural already."""

SHARDED = ("parameters", "gradients", "optimizer states")


def by_cost(row: FitRow, given_ranks: bool) -> tuple[float, ...]:
    """Return the key by which rows are sorted; equal ones stay in the order of the stages."""
    seconds = 0.0 if row.paper is None else row.paper.step
    return (0 if given_ranks else row.smallest, seconds, row.recomputed, row.copied + row.sent)


def words_of(choice: FitRow | Unfit) -> str:
    """Describe a choice: `fsdp2, units of one block, checkpointing`."""
    words = [choice.implementation]
    if choice.units and choice.wrap != "block":
        words.append(f"units: {choice.wrap}")
    if not choice.reshard:
        words.append("units stay gathered")
    sizes = {field: getattr(choice, field) for field in AXES}
    words += [AXES[field][1].format(size) for field, size in sizes.items() if size > 1]
    if choice.offload != "none":
        words.append(f"offloaded to {choice.offload} memory")
    if choice.checkpoint_activations:
        words.append("checkpointing")
    if choice.microbatches > 1:
        words.append(f"{choice.microbatches} microbatches of {choice.batch}")
    return ", ".join(words)


def on_ranks(ranks: int) -> str:
    """Return the number in words: `1 rank`."""
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"


def taken(rows: Sequence[FitRow]) -> int:
    """Return the place of the row to take: the first, or one that shards nothing."""
    for place, row in enumerate(rows):
        plain = row.stage == 0 and _plain(row) and row.ranks == rows[0].ranks
        if plain and (row.paper is None or row.paper == rows[0].paper):
            return place
    return 0


def advise_on(
    rows: Sequence[FitRow],
    place: int,
    unfit: Sequence[Unfit],
    verdict: MemoryVerdict | None,
    too_large: Sequence[FitRow] = (),
) -> Iterator[str]:
    """Yield sentences: the row to take, why none of a lower stage, and what is next to it.

    Args:
        rows: that fit, by cost.
        place: of the row to take.
        unfit: choices that do not fit.
        verdict: on the row to take, None without rows.
        too_large: rows that fit by their peaks, and for which the caching allocator takes more than
            the device has.
    """
    if verdict is None:
        yield from _nothing(unfit) if unfit else ("nothing fits",)
        yield from map(_passed_over, too_large)
        return
    first = rows[place]
    if first.stage == 0 and _plain(first):
        where = f"on {on_ranks(first.ranks)}"
        yield f"{first.implementation} fits {where}: take it; sharding buys nothing here"
        yield _headroom(first, verdict.limit)
        yield from map(_passed_over, too_large)
        yield from verdict_words(verdict)
        if first.paper is not None:
            yield _on_paper(first.paper)
        if rows[0].sent < first.sent:
            yield (
                f"{words_of(rows[0])} would send {decimal(rows[0].sent)} in a step instead of "
                f"{decimal(first.sent)}, in {rows[0].calls:,} collectives instead of "
                f"{first.calls:,}"
            )
        return
    reason = _reason(first, rows, unfit)
    for field, (*_, without) in [*AXES.items()][1:]:
        if getattr(first, field) > 1 and any(getattr(one, field) == 1 for one in unfit):
            reason = f"with {without} nothing fits on up to {on_ranks(unfit[0].ranks)}; {reason}"
    yield f"take {words_of(first)} on {on_ranks(first.ranks)}: {reason}"
    yield _headroom(first, verdict.limit)
    if first.host:
        yield (
            f"each rank takes {binary(first.host)} of its host, where the optimizer runs, and "
            f"copies {decimal(first.copied)} in a step"
        )
    yield from map(_passed_over, too_large)
    yield from verdict_words(verdict)
    if first.paper is not None:
        yield _on_paper(first.paper)
    yield from _lower(first, rows, unfit)
    if first.recomputed:
        free = [row for row in rows if not row.recomputed]
        if free:
            yield f"without recomputation: {words_of(free[0])}, from {on_ranks(free[0].smallest)}"
        else:
            yield "without recomputation nothing fits"


def _headroom(row: FitRow, limit: int) -> str:
    needs = {NAMES.get(name, name): size for name, size in row.peak.bytes.items()}
    largest = max(needs, key=lambda name: needs[name])
    return (
        f"its peak of {binary(row.peak.total)} is {row.peak.total / limit:.0%} of the device, most "
        f"of it {largest}; the rest is for what is not simulated"
    )


def _passed_over(row: FitRow) -> str:
    """Say what the caching allocator takes for a row that was tried before the one to take."""
    assert row.reserved is not None
    least = min(row.reserved.default, row.reserved.expandable)
    return (
        f"{words_of(row)} on {on_ranks(row.ranks)} would fit by its peak of "
        f"{binary(row.peak.total)}, but torch's caching allocator would reserve {binary(least)}"
    )


def _on_paper(time: PaperTime) -> str:
    return (
        f"on paper a step takes {seconds(time.step)} at least: {seconds(time.compute)} of compute, "
        f"and {seconds(time.exposed)} of communication with nothing to hide behind"
    )


def seconds(time: float) -> str:
    """Format a time with three digits: `12.3 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if time * factor >= 0.9995:
            return f"{time * factor:.3g} {unit}"
    return f"{time * 1e6:.3g} us" if time else "0 s"


def _plain(row: FitRow) -> bool:
    return not row.recomputed and row.microbatches == 1


MUST = {
    0: "nothing needs to be sharded",
    1: "optimizer states are too much for each rank",
    2: "gradients and optimizer states are too much for each rank",
    3: "parameters, gradients and optimizer states are too much for each rank",
}
"""Parts that do not fit whole, by the lowest stage that fits."""


def _reason(row: FitRow, rows: Sequence[FitRow], unfit: Sequence[Unfit]) -> str:
    cheapest = "recomputes and sends the least"
    if row.paper is not None:
        cheapest = "takes the least time on paper"
    stages = [one.stage for one in rows if one.ranks == row.ranks and one.stage is not None]
    if row.stage is None or not stages or row.ranks == 1:  # one rank shards nothing
        return f"of what fits it {cheapest}"
    lowest = min(stages)
    tried = [one.stage for one in (*rows, *unfit) if one.stage is not None]
    if lowest and not any(stage < lowest for stage in tried):  # the user named the implementation
        return f"of what fits it {cheapest}"
    return MUST[lowest] if lowest == row.stage else f"{MUST[lowest]}; of what fits it {cheapest}"


def _lower(first: FitRow, rows: Sequence[FitRow], unfit: Sequence[Unfit]) -> Iterator[str]:
    """Say of each lower stage what keeps it out, or what it costs."""
    if first.stage is None:
        return
    both: list[FitRow | Unfit] = [*rows, *unfit]
    lower = [(one.stage, one.implementation) for one in both if one.stage is not None]
    names = dict.fromkeys(name for stage, name in sorted(lower) if stage < first.stage)
    for name in names:
        fitting = [row for row in rows if row.implementation == name]
        if fitting:
            best = fitting[0]
            cost = f"sends {decimal(best.sent)} in a step"
            if best.paper is not None:
                cost += f", which takes {seconds(best.paper.step)} on paper"
            yield f"{words_of(best)} fits from {on_ranks(best.smallest)}, and {cost}"
            continue
        least = min((one for one in unfit if one.implementation == name), key=lambda one: one.total)
        yield f"{name} does not fit: {_shortage(least)}"


def _shortage(one: Unfit) -> str:
    needs = {NAMES.get(name, name): size for name, size in one.needs.items() if size}
    largest = sorted(needs, key=lambda name: -needs[name])[:2]
    most = " and ".join(f"{name} {binary(needs[name])}" for name in largest)
    how = "by the formula a rank holds at least" if one.by_formula else "simulated, a rank holds"
    return f"{how} {binary(one.total)} on {on_ranks(one.ranks)}, most of it {most}"


def _nothing(unfit: Sequence[Unfit]) -> Iterator[str]:
    least = min(unfit, key=lambda one: one.total)
    yield f"nothing fits on {on_ranks(least.ranks)}"
    yield f"nearest is {words_of(least)}: {_shortage(least)}"
    needs = {NAMES.get(name, name): size for name, size in least.needs.items() if size}
    largest = max(needs, key=lambda name: needs[name])
    if largest in SHARDED and least.stage == 3:
        yield "these are sharded over all ranks: more ranks are needed (--world-size)"
    elif largest == "gathered parameters":
        yield (
            "a single layer is too large for a rank: it must be sharded itself, over more ranks "
            "(--tensor-parallel)"
        )
    elif largest in ("activations", "temporaries"):
        yield (
            "activations follow the samples and positions of a microbatch: a shorter --sequence, "
            "or one that is sharded in attention too (context parallelism), which is not tried here"
        )
