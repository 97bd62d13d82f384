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
from ..setup import Setup
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
    "pipeline, context and expert parallelism",
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
        model=base.model,
        elements=search.model.elements,
        blocks=search.blocks,
        batch=base.batch * base.microbatches,
        sequence=base.sequence,
        inputs=given.samples(base).words,
        precision=base.precision,
        optimizer=base.optimizer,
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
LAYERS_OVER = (2, 4, 8)
"""Ranks that layers are sharded over: those of a node, whose links are the fastest."""


def _found(
    search: FitSearch, restriction: Restriction, *, exhaustive: bool
) -> tuple[list[Fewest], list[str]]:
    """Return the fewest ranks of all choices, and what was not tried where something fits.

    Tensor parallelism is tried where nothing fits with whole layers, over as few ranks as it takes,
    and the memory of the host where that is not enough.
    """
    found = search.fewest(restriction, exhaustive=exhaustive)
    left: list[str] = []
    if not _any_fits(found):
        more, left = _layers_sharded(search, restriction, exhaustive=exhaustive)
        found = [*found, *more]
    elif restriction.tensor_parallel is None and restriction.offload in (None, "none"):
        left = ["tensor parallelism (--tensor-parallel): something fits with whole layers"]
    if restriction.offload is not None or restriction.tensor_parallel not in (None, 1):
        return found, left
    if _any_fits(found):
        return found, [*left, "CPU offload (--offload): something fits without"]
    if restriction.implementation is not None:
        return found, left
    offloaded = replace(restriction, offload="pinned")
    return [*found, *search.fewest(offloaded, exhaustive=exhaustive)], left


def _any_fits(found: Sequence[Fewest]) -> bool:
    return any(one.ranks is not None for one in found)


def _layers_sharded(
    search: FitSearch, restriction: Restriction, *, exhaustive: bool
) -> tuple[list[Fewest], list[str]]:
    """Return the choices with tensor parallelism, and what of it was not tried."""
    found: list[Fewest] = []
    if restriction.tensor_parallel is not None or restriction.offload not in (None, "none"):
        return found, []
    if restriction.replicas not in (None, 1):
        return found, ["tensor parallelism: with replicas it is not simulated"]
    for count in LAYERS_OVER:
        sharded = replace(restriction, tensor_parallel=count)
        try:
            search.given.part(replace(search.base, tensor_parallel=count))  # can it be sharded so?
            more = search.fewest(sharded, exhaustive=exhaustive)
        except UsageError as error:
            return found, [f"tensor parallelism: {error}"]
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
    if setup.tensor_parallel > 1 or setup.offload != "none":
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
        "replicas": choice.replicas,
        "tensor_parallel": choice.tensor_parallel,
        "offload": choice.offload,
    }
