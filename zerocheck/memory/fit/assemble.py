"""Assembly of the report of a search: rows with their costs, what does not fit, and advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from ...catalogue import BY_STAGE, OF_EXTRAS
from ...errors import UsageError
from ..analyse import paper_elements
from ..operations import ForwardOperations, forward_operations
from ..setup import AXES, Setup, option_of
from ..source import source
from ..verdict import judge_memory, room
from .choices import Choice, Restriction, options_of, searched
from .recommend import advise_on, by_cost, taken
from .result import FitReport, FitRow, PaperTime, Speeds, Unfit
from .search import MOST_RANKS, Fewest, FitSearch, SimulatedPoint, check_fit, numbers_of_ranks
from .step_time import paper_schedule

NOT_TRIED = (
    "numbers of ranks between powers of two",
    "smaller units that stay gathered: all of them are whole at the end of the forward",
    "context parallelism",
)


def fit(
    base: Setup,
    limit: int,
    *,
    most_ranks: int | None = None,
    restriction: Restriction | None = None,
    exact: bool = False,
    exhaustive: bool = False,
    speeds: Speeds | None = None,
    notify: Callable[[str], None] = lambda words: None,
) -> FitReport:
    """Search for the choices that fit.

    Args:
        base: model, samples per step and rank, precision and optimizer; the rest is searched.
        limit: bytes of the device's memory.
        most_ranks: as many ranks as the user has; None searches for the fewest.
        restriction: options that are kept.
        exact: simulate all blocks.
        exhaustive: simulate every choice on every number of ranks, whatever formulas say.
        speeds: of the link and of compute, for the step time on paper.
        notify: called with words before each simulation.

    Raises UsageError for what cannot be searched or simulated.
    """
    most = MOST_RANKS if most_ranks is None else most_ranks
    check_fit(replace(base, world_size=most))
    if restriction is not None and restriction.implementation is not None:
        base.check_axes()
    given = source(base.model)
    given_ranks = most_ranks is not None
    search = FitSearch(
        base,
        given,
        limit,
        numbers_of_ranks(most),
        given_ranks=given_ranks,
        exact=exact,
        notify=notify,
    )
    operations = forward_operations(given, base)

    def searched_rows() -> tuple[list[Fewest], list[str], list[FittingRow]]:
        found, left = _found(search, restriction or Restriction(), exhaustive=exhaustive)
        fitting = [
            (_row(search, one, most_ranks, operations, speeds), one.choice)
            for one in found
            if one.ranks is not None
        ]
        return found, left, sorted(fitting, key=lambda pair: by_cost(pair[0], given_ranks))

    found, left, fitting = searched_rows()
    verdict, place, too_large = None, 0, list[FitRow]()
    while fitting and verdict is None:
        place = taken([row for row, _ in fitting])
        row, choice = fitting[place]
        held, reason = None, NOT_LOOKED_AT
        if len(too_large) < LOOKED_AT:
            held, reason = search.reserved(choice, row.ranks)
        row = structs.replace(row, reserved=held)
        verdict = judge_memory(limit, row.peak.total, held, reason)
        fitting[place] = row, choice
        if not verdict.fits:
            # A choice that this one replaced may be the one to take.
            search.too_large[choice] = row.ranks
            too_large.append(row)
            found, left, fitting = searched_rows()
            verdict = None
    rows = [row for row, _ in fitting]
    unfit = [
        _unfit(search, one)
        for one in found
        if one.ranks is None and one.choice not in search.too_large
    ]
    not_tried = [*NOT_TRIED, *left]
    if restriction is None or restriction.implementation is None:
        not_tried.append(f"{', '.join(OF_EXTRAS)} (--implementation)")
    if not given_ranks:
        not_tried.append("HSDP without --world-size: it needs no fewer ranks than full sharding")
    left_out = [name for name in BY_STAGE.values() if name not in searched(base)]
    if left_out:
        not_tried.append(
            f"{' and '.join(left_out)} with {base.optimizer}: their shards are as long as the "
            "largest matrix"
        )
    if not search.blocks:
        not_tried.append("activation checkpointing: the model has no list of blocks")
    advice = advise_on(rows, place, unfit, verdict, too_large)
    return FitReport(
        **{name: getattr(base, name) for name in ("model", "sequence", "precision", "optimizer")},
        elements=search.model.elements,
        blocks=search.blocks,
        batch=base.batch * base.microbatches,
        inputs=given.samples(base).words,
        limit=limit,
        most_ranks=most,
        given_ranks=given_ranks,
        rows=tuple(rows),
        taken=place,
        verdict=verdict,
        unfit=tuple(unfit),
        simulations=len(search.points),
        by_formula=len(search.by_formula),
        by_update=len(search.by_update),
        advice=tuple(advice),
        not_tried=tuple(not_tried),
        assumes=given.assumes(base),
        speeds=speeds,
    )


FittingRow = tuple[FitRow, Choice]
LOOKED_AT = 12
"""Times that the caching allocator is asked at most: all blocks are simulated for each."""
NOT_LOOKED_AT = f"it was computed for {LOOKED_AT} cheaper choices, and none fits"
SIZES = (2, 4, 8)
"""Ranks that layers, experts and blocks are divided over: those of a node, whose links are the
fastest."""
TRIED_LAST = ("tensor_parallel", "expert_parallel", "pipeline_parallel")
"""Axes that are tried where nothing fits without, in this order."""


def _found(
    search: FitSearch, restriction: Restriction, *, exhaustive: bool
) -> tuple[list[Fewest], list[str]]:
    """Return the fewest ranks of all choices, and what was not tried where something fits.

    Each axis of TRIED_LAST is tried where nothing fits with those before, over as few ranks as it
    takes, and the memory of the host where that is not enough.
    """
    found = search.fewest(restriction, exhaustive=exhaustive)
    left: list[str] = []
    free = all(getattr(restriction, field) in (None, 1) for field in TRIED_LAST)
    within = free and restriction.offload in (None, "none")
    for field in TRIED_LAST if within else ():
        name = field.replace("_parallel", " parallelism")
        known = field != "expert_parallel" or search.experts
        if getattr(restriction, field) is not None or not known:
            continue
        if _any_fits(found):
            left.append(f"{name} ({option_of(field)}): something fits with {AXES[field][-1]}")
        elif restriction.replicas not in (None, 1):
            left.append(f"{name}: with replicas it is not simulated")
        else:
            more, reasons = _divided(search, restriction, field, exhaustive=exhaustive)
            found, left = [*found, *more], [*left, *(f"{name}: {reason}" for reason in reasons)]
    if restriction.offload is not None or not free:
        return found, left
    if _any_fits(found):
        return found, [*left, "CPU offload (--offload): something fits without"]
    if restriction.implementation is not None:
        return found, left
    offloaded = replace(restriction, offload="pinned")
    return [*found, *search.fewest(offloaded, exhaustive=exhaustive)], left


def _any_fits(found: Sequence[Fewest]) -> bool:
    return any(one.ranks is not None for one in found)


def _divided(
    search: FitSearch, restriction: Restriction, field: str, *, exhaustive: bool
) -> tuple[list[Fewest], list[str]]:
    """Return the choices with an axis, and why larger sizes of it were not tried."""
    found: list[Fewest] = []
    for count in SIZES:
        size: dict[str, Any] = {field: count}
        divided = replace(restriction, **size)
        try:
            search.given.part(replace(search.base, world_size=count, **size))  # can it be so?
            more = search.fewest(divided, exhaustive=exhaustive)
        except UsageError as error:
            return found, [str(error)]
        found += more
        if _any_fits(more):
            break
    return found, []


def _row(
    search: FitSearch,
    one: Fewest,
    most_ranks: int | None,
    operations: ForwardOperations,
    speeds: Speeds | None,
) -> FitRow:
    assert one.ranks is not None
    ranks = one.ranks if most_ranks is None else most_ranks
    point = search.point(one.choice, ranks)
    if point.peak.total > room(search.limit):  # more ranks, and yet a higher peak
        ranks = one.ranks
        point = search.point(one.choice, ranks)
    setup = one.choice.setup(search.base, ranks)
    return FitRow(
        **_described(search, one.choice),
        smallest=one.ranks,
        ranks=ranks,
        peak=point.peak,
        sent=float(point.traffic.sent),
        communicated=paper_elements(setup, search.model.elements),
        calls=point.traffic.calls,
        host=0 if point.host is None else point.host.taken,
        copied=0 if point.host is None else point.host.to_device + point.host.to_host,
        recomputed=operations.share_of_blocks if one.choice.checkpoint else 0.0,
        paper=None if speeds is None else _paper(search, setup, point, speeds),
        command=setup.command(),
    )


def _paper(
    search: FitSearch, setup: Setup, point: SimulatedPoint, speeds: Speeds
) -> PaperTime | None:
    if max(setup.axes._replace(replicas=1)) > 1 or setup.offload != "none":
        return None
    operations = forward_operations(search.given, setup)
    model = search.given.build()
    schedule = paper_schedule(setup, model, operations, point.traffic, speeds)
    return None if schedule is None else schedule.time()


def _unfit(search: FitSearch, one: Fewest) -> Unfit:
    return Unfit(
        **_described(search, one.choice),
        ranks=search.ranks[-1],
        by_formula=not one.simulated,
        needs=one.needs,
        total=sum(one.needs.values()),
    )


def _described(search: FitSearch, choice: Choice) -> dict[str, Any]:
    setup = choice.setup(search.base, 1)
    return {
        "implementation": choice.implementation,
        "stage": setup.stage,
        "wrap": choice.wrap,
        "units": "wrap" in options_of(choice.implementation),
        "reshard": choice.reshard,
        "checkpoint_activations": choice.checkpoint,
        "microbatches": choice.microbatches,
        "batch": setup.batch,
        **choice.axes._asdict(),
        "offload": choice.offload,
    }
