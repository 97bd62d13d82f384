"""Analysis of a setup: simulation, extrapolation where it is proven, and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from msgspec import structs

from ..models.parts import block_list
from ..protocol.layout import CATEGORIES
from .advice import advise
from .collectives import StepTraffic, step_traffic, with_more_blocks
from .extrapolate import TRIED, NotUniform, extrapolate, grown, refuse_early
from .fixed import check_fixed, fixed_values
from .formulas import STAGES, communicated
from .host import SimulatedHost, host_of_more_blocks, simulated_host
from .log import Log
from .optimizer_parts import OptimizerPart, gradients_of, paper_words, parts_of, total_of, words_of
from .reserved import reserved
from .result import Alternative, Between, Device, MemoryReport, ModulePeak
from .setup import Setup
from .simulate import MIDDLE, STEPS, Simulation, simulate, simulate_apart
from .source import ModelSource, alike, source
from .timeline import HeldBytes, Timeline, of_shards, timeline
from .verdict import MemoryVerdict, Reserved, judge_memory, room

SHARED = set(MemoryReport.__struct_fields__) & {*dir(Setup)} - {"command"}
"""Fields of a report that say what its setup does."""
MANY = 2 * max(TRIED)
"""Blocks from which on it is cheaper to simulate a few three times."""


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """Timeline of the whole model, and its origin.

    counts: bytes of step counts; traffic: of the last step; log: None where it was extrapolated;
    host: None where no shards are offloaded; simulated, reason, left_out: see MemoryReport; rank:
    the one that was counted.
    """

    timeline: Timeline
    counts: int
    traffic: StepTraffic
    path: str
    log: Log | None = None
    host: SimulatedHost | None = None
    simulated: tuple[int, ...] = ()
    reason: str = ""
    left_out: int = 0
    rank: int = 0


Notify = Callable[[str], None]


def silent(_: str) -> None:
    """Report no progress."""


def analyse(
    setup: Setup,
    *,
    exact: bool = False,
    limit: int | None = None,
    notify: Notify = silent,
    show: Callable[[MemoryReport | Alternative], None] = lambda one: None,
) -> MemoryReport:
    """Simulate one rank.

    Args:
        setup: what is simulated.
        exact: simulate all blocks.
        limit: bytes of the device's memory.
        notify: called with words on the progress, often.
        show: called with the report, before alternatives are tried, and with each of these.

    Raises UsageError for what cannot be simulated.
    """
    setup.check()
    given = source(setup.model)
    whole = given.build()
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    found = block_list(whole)
    command, one_stage = setup.command(), setup.pipeline_parallel > 1 and setup.rank is None
    done = run(setup, given, exact=exact, notify=notify)
    setup = replace(setup, rank=done.rank)
    undivided = replace(setup, tensor_parallel=1, expert_parallel=1)
    parts = parts_of(setup, given.part(setup))
    whole_parts = parts_of(undivided, given.part(undivided))
    device = None if limit is None else _device(setup, parts, done, limit)
    held, unheld = reserved_of(setup, done)
    report = MemoryReport(
        **{name: getattr(setup, name) for name in SHARED},
        inputs=given.samples(setup).words,
        checkpoint_activations=setup.checkpoint,
        command=command,
        elements=sum(sizes.values()),
        tensors=len(sizes),
        blocks=len(found[1]) if found else 0,
        simulated=done.simulated,
        reason=done.reason,
        left_out=done.left_out,
        lines=done.timeline.lines(),
        between=_between(setup, parts, whole_parts, done),
        peak=done.timeline.peak(),
        rows=tuple(_rows(done)),
        assumes=(*given.assumes(setup), *((HIGHEST_STAGE,) if one_stage else ())),
        device=device,
        reserved=held,
        unreserved=unheld,
        host=None if done.host is None else done.host.memory,
    )
    show(report)
    if limit is None or device is None or device.verdict.fits:
        return report

    def judge(other: Setup) -> MemoryVerdict:
        ran = run(other, source(other.model), exact=exact, notify=notify)
        return verdict_of(other, ran, limit)

    tried = []
    for one in advise(setup, judge):
        tried.append(one)
        show(one)
    return structs.replace(report, device=structs.replace(device, tried=tuple(tried)))


def reserved_of(setup: Setup, done: SimulatedRank) -> tuple[Reserved | None, str]:
    """Return what the caching allocator would reserve, or None and the reason."""
    if done.log is None:
        return None, "blocks were extrapolated: use --exact"
    if setup.traits.frees_late:
        return None, f"{setup.implementation} frees memory when its streams are through"
    default = reserved(done.log, building=False)
    return Reserved(
        allocated=default.peak_allocated,
        default=default.peak_reserved,
        expandable=reserved(done.log, building=False, expandable=True).peak_reserved,
        building=reserved(done.log).peak_reserved,
    ), ""


def verdict_of(setup: Setup, done: SimulatedRank, limit: int) -> MemoryVerdict:
    """Judge whether a simulated rank fits into a device."""
    return judge_memory(limit, done.timeline.peak().total, *reserved_of(setup, done))


HIGHEST_STAGE = "counted: the pipeline stage that needs the most; --rank selects another one"
TYPICAL = 5
"""Microbatches that are simulated of a step of more: two, two that must be alike, and the last.
Each one that is left out is as those two. DeepSpeed's stage 3 learns the order of parameters in
the first two of a training."""


def run(
    setup: Setup, given: ModelSource, *, exact: bool = False, notify: Notify = silent
) -> SimulatedRank:
    """Return the timeline of the whole model, of TYPICAL microbatches where they are alike.

    Of a pipeline all are simulated, since each has buffers of its own, and the stage is counted
    that needs the most.
    """
    check_fixed(setup)
    done = [
        replace(_of_rank(replace(setup, rank=rank), given, exact, notify), rank=rank)
        for rank in setup.counted
    ]
    return max(done, key=lambda one: one.timeline.peak().total)


def _of_rank(setup: Setup, given: ModelSource, exact: bool, notify: Notify) -> SimulatedRank:
    obeys = setup.traits.obeys_microbatches or "microbatches" not in fixed_values(setup)
    all_of_them = exact or not obeys or setup.pipeline_parallel > 1
    left_out = 0 if all_of_them else max(0, setup.microbatches - TYPICAL)
    if left_out:
        fewer = replace(setup, microbatches=TYPICAL)
        with suppress(_UnlikeMicrobatches):
            done = _run(fewer, given, exact=exact, notify=notify, left_out=left_out)
            return replace(done, left_out=left_out)
    return _run(setup, given, exact=exact, notify=notify)


class _UnlikeMicrobatches(Exception):
    """Error for microbatches in the middle of a step that are not alike."""


def _check_alike(one: Simulation) -> None:
    """Raise _UnlikeMicrobatches unless two microbatches of each step do the same, and leave as much
    memory behind as they find."""
    lines = [timeline(one.log, one.blocks, host=host) for host in (False, True)]
    for step in range(STEPS):
        for line in lines:
            runs = line.microbatches(step)
            if len(runs) not in (0, TYPICAL):
                raise _UnlikeMicrobatches
            middle, following = runs[MIDDLE : MIDDLE + 2] if runs else ([], [])
            left = [
                sum(e.allocated[i] - e.freed[i] for e in middle) for i, _ in enumerate(CATEGORIES)
            ]
            if any(left) or middle != following:
                raise _UnlikeMicrobatches
        for moved in (one.log.collectives, one.log.copies):
            first, second = (
                [each[:-1] for each in moved if each.step == step and each.microbatch == number]
                for number in (MIDDLE, MIDDLE + 1)
            )
            if first != second:
                raise _UnlikeMicrobatches


def _run(
    setup: Setup, given: ModelSource, *, exact: bool, notify: Notify, left_out: int = 0
) -> SimulatedRank:
    found = block_list(given.held(setup))
    if exact or found is None or len(found[1]) < MANY:
        return _whole(setup, given, notify, left_out=left_out)
    path, blocks = found
    try:
        if (difference := alike(blocks)) is not None:
            raise NotUniform(difference)
        runs: list[Simulation] = []
        lines: list[Timeline] = []
        for count in TRIED:
            runs.append(_simulated(setup, given, notify, count))
            if left_out:
                _check_alike(runs[-1])
            lines.append(timeline(runs[-1].log, path))
            if len(lines) == 2:
                refuse_early(*lines)
        counts = grown([*map(_counts, runs)], len(blocks) - TRIED[0], "step counts do")
        traffic = with_more_blocks(
            [_traffic(one, left_out) for one in runs], len(blocks) - TRIED[0]
        )
        if traffic is None:
            raise NotUniform("collectives do not grow by a constant")
        made = extrapolate(lines, path, len(blocks))
        host = None
        if setup.offload != "none":
            hosts = [simulated_host(one, left_out) for one in runs]
            host = host_of_more_blocks(hosts, len(blocks) - TRIED[0])
        return SimulatedRank(made, counts, traffic, path, host=host, simulated=TRIED)
    except NotUniform as reason:
        return _whole(setup, given, notify, str(reason), left_out=left_out)


def _simulated(
    setup: Setup, given: ModelSource, notify: Notify, blocks: int | None = None
) -> Simulation:
    words = setup.command().removeprefix("zerocheck memory ")
    if blocks is not None:
        words += f", {blocks} blocks"

    def at(place: str) -> None:
        notify(f"simulating {words}: {place}")

    if setup.offload == "none":
        return simulate(setup, given, blocks, notify=at)
    return simulate_apart(setup, blocks, at)


def _whole(
    setup: Setup, given: ModelSource, notify: Notify, reason: str = "", *, left_out: int
) -> SimulatedRank:
    one = _simulated(setup, given, notify)
    if left_out:
        _check_alike(one)
    host = None if setup.offload == "none" else simulated_host(one, left_out)
    return SimulatedRank(
        timeline(one.log, one.blocks),
        _counts(one),
        _traffic(one, left_out),
        one.blocks,
        one.log,
        host,
        reason=reason,
    )


def _traffic(one: Simulation, left_out: int) -> StepTraffic:
    last = [call for call in one.log.collectives if call.step == STEPS - 1]
    last += left_out * [call for call in last if call.microbatch == MIDDLE]
    return step_traffic(((call.phase, call.kind), call.sent) for call in last)


def _counts(one: Simulation) -> int:
    """Return the bytes of step counts.

    Storages are gone by now, so it is the memory that was allocated for them.
    """
    storages = one.log.storages
    return sum(more for _, number, more in one.log.changes if more > 0 and storages[number].counts)


def _between(
    setup: Setup,
    parts: Sequence[OptimizerPart],
    whole: Sequence[OptimizerPart],
    done: SimulatedRank,
) -> Between:
    elements = sum(one.elements for one in parts)
    held = done.timeline.at_end("step", STEPS - 1)
    ours = of_shards(held) + (0 if done.host is None else done.host.shards)
    formula = paper = None
    released = Fraction(0)
    stage = setup.held_stage
    if stage is not None:
        formula = total_of(parts, setup.shards, stage, setup.held_kind)
        if not held.get("gradient") and done.host is None:
            released = gradients_of(parts, setup.shards, stage, setup.held_kind)
        if setup.precision == "mixed" and setup.held_kind != "mixed":
            paper = total_of(parts, setup.shards, stage, "mixed")
    return Between(
        held=ours,
        formula=None if formula is None else float(formula),
        words="" if stage is None else _formula_words(setup, parts, stage),
        counts=done.counts,
        released=float(released),
        padding=None if formula is None else float(ours + released - formula - done.counts),
        paper=None if paper is None else float(paper),
        paper_words=paper_words(parts),
        unlike="weights and gradients" if setup.held_kind == "fp32" else "gradients",
        copy=words_of(whole, 0, setup.held_kind),
        copies=float(setup.stage_ranks * ours / total_of(whole, 1, 0, setup.held_kind)),
        communicated=paper_elements(setup, elements),
        bucket=held.get("bucket", 0),
        buffer=held.get("buffer", 0),
    )


def _formula_words(setup: Setup, parts: Sequence[OptimizerPart], stage: int) -> str:
    words = words_of(parts, stage, setup.held_kind)
    if max(setup.axes) > 1:
        words += f", N = {setup.shards}"
    if setup.tensor_parallel > 1:
        words += f", Psi = {sum(one.elements for one in parts):,} of a rank"
    elif setup.pipeline_parallel > 1 and len(parts) == 1:
        words += f", Psi = {parts[0].elements:,} of the stage"
    return words


def paper_elements(setup: Setup, elements: int) -> int | None:
    """Return the elements that the ZeRO paper has a step move, or None where it says nothing."""
    if setup.stage is None or max(setup.axes) > 1:
        return None
    return communicated(elements, setup.stage)


def _rows(done: SimulatedRank) -> list[ModulePeak]:
    """Return the modules of the last step in order of time, all blocks as one."""
    groups: dict[tuple[str, str], list[HeldBytes]] = {}
    for (step, phase, module), held in done.timeline.peaks().items():
        if step == STEPS - 1:
            groups.setdefault((phase, _group(module, done.path)), []).append(held)
    rows = []
    for (_, module), inside in groups.items():
        best = max(inside, key=lambda one: one.total)
        lowest = min(one.total for one in inside)
        rows.append(ModulePeak(phase=best.phase, module=module, lowest=lowest, held=best))
    return rows


def _group(module: str, path: str) -> str:
    if path and module.startswith(f"{path}."):
        return f"{path}.*"
    return module.split(".")[0]


def _device(
    setup: Setup, parts: Sequence[OptimizerPart], done: SimulatedRank, limit: int
) -> Device:
    line, verdict = done.timeline, verdict_of(setup, done, limit)
    peak = line.peak()
    # Gathered units and buckets depend on the stage; the rest of the peak is the same in all.
    moving = peak.bytes.get("activation", 0) + peak.bytes.get("other", 0)
    held = setup.held_kind
    stages = {s: moving + int(total_of(parts, setup.shards, s, held)) for s in STAGES}
    if setup.offload != "none":
        stages = {}  # they count all of it on the device
    asks = next((stage for stage, size in stages.items() if size <= room(limit)), None)
    over = line.first_over(room(limit))
    return Device(verdict=verdict, over=over, stages=stages, asks=asks)
