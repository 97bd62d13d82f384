"""Report of a simulated rank, in words and tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from ..protocol.layout import CATEGORIES, Category
from ..sizes import binary
from .result import Alternative, Device, HostMemory, MemoryReport
from .timeline import HeldBytes
from .verdict import MemoryVerdict, room, words_of

NOT_IN_IT = (
    "not in the peak: rounding and fragmentation of the allocator, the CUDA context, buffers of "
    "the collectives' library, what kernels allocate inside, and the building of the model; "
    "operators are those of torch's CPU"
)

AUTOCAST = (
    "torch.autocast casts here; the bf16 copy of a weight, which it keeps for the backward, counts "
    "as an activation"
)


def render(report: MemoryReport) -> str:
    """Render the whole report for a terminal."""
    parts = [_head(report), _attribution(report), _between(report), _peak(report)]
    if report.host is not None:
        parts.append(_host(report.host))
    if report.device is not None:
        parts.append(_device(report.device))
    notes = [*report.assumes, NOT_IN_IT]
    if report.autocast:
        notes.append(AUTOCAST)
    parts.append(iter(notes))
    if report.device is not None and not report.device.verdict.fits:
        tried = map(words_of_alternative, report.device.tried)
        parts.append(iter(["what was tried (simulated):", *tried]))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def words_of_alternative(one: Alternative) -> str:
    """Describe what was tried, and the command of what fits."""
    words = f"  {one.change}: {_briefly(one.verdict)}"
    return f"{words}\n    {one.command}" if one.fits else words


def _head(report: MemoryReport) -> Iterator[str]:
    yield (
        f"{report.model}: {report.elements:,} parameters in {report.tensors:,} tensors, "
        f"{report.blocks} blocks"
    )
    checkpointing = ", activation checkpointing" if report.checkpoint_activations else ""
    if report.host is not None:
        checkpointing += f", shards offloaded to {report.offload} memory of the host"
    samples = samples_words(report.batch, report.sequence, report.inputs)
    axes = f" in {report.replicas} replicas" if report.replicas > 1 else ""
    if report.tensor_parallel > 1:
        axes = f", layers sharded over {report.tensor_parallel}"
    if report.expert_parallel > 1:
        axes = f", experts divided over {report.expert_parallel}"
    if (stages := report.pipeline_parallel) > 1:
        axes += f", stage {report.rank * stages // report.world_size} of {stages}"
    yield (
        f"{report.implementation}, rank {report.rank} of {report.world_size:,}{axes}, "
        f"{samples}, {report.precision} precision, units: {report.wrap}{checkpointing}"
    )
    if report.simulated:
        counts = ", ".join(map(str, report.simulated[:-1]))
        yield (
            f"extrapolated: {counts} and {report.simulated[-1]} blocks were simulated, and each "
            f"block more adds the same events; --exact simulates all {report.blocks}"
        )
    elif report.reason:
        yield f"all blocks simulated, since they do not repeat: {report.reason}"
    if report.left_out:
        yield (
            f"{report.left_out} microbatches of a step are not simulated: the third and the fourth "
            "are alike, and so is each after them but the last; --exact simulates all"
        )


def samples_words(batch: int, sequence: int, inputs: tuple[str, ...]) -> str:
    """Describe a microbatch. inputs: shapes of what a factory draws, empty for token ids."""
    return f"inputs {', '.join(inputs)}" if inputs else f"{batch} x {sequence} positions"


def _attribution(report: MemoryReport) -> Iterator[str]:
    used = [c for c in CATEGORIES if any(line.category == c for line in report.lines)]
    ends = dict.fromkeys((line.step, line.phase) for line in report.lines)
    rows = []
    for step, phase in ends:
        held = report.at_end(phase, step)
        name = phase if step < 0 else f"{phase}, step {step}"
        rows.append([name, *(_short(held.get(c, 0)) for c in used), _short(sum(held.values()))])
    yield tabulate(
        rows,
        headers=["held at the end of", *used, "total"],
        colalign=["left", *["right"] * (len(used) + 1)],
        disable_numparse=True,
    )


def _between(report: MemoryReport) -> Iterator[str]:
    held = report.between
    host = ", those of the host included" if report.host is not None else ""
    yield f"between steps: {binary(held.held)} ({held.held:,} bytes{host})"
    if held.formula is None or held.padding is None:
        yield "  no formula: the stage of this implementation is not known"
    else:
        yield f"  {held.words:<18}{held.formula:>24,.1f} bytes"
        yield f"  {'step counts':<18}{held.counts:>24,} bytes"
        if held.released:
            yield f"  {'gradients':<18}{-held.released:>24,.1f} bytes, which the step lets go of"
        share = held.padding / held.formula
        yield f"  {'padding':<18}{held.padding:>24,.1f} bytes, {share:.4%} of the formula"
    if held.paper is not None and held.paper != held.formula:
        yield (
            f"  the ZeRO paper's mixed precision ({held.paper_words} bytes) would be "
            f"{binary(held.paper)}; here {held.unlike} are in fp32"
        )
    yield f"  all ranks together hold {held.copies:.4g} copies of {held.copy}"
    if held.communicated is not None:
        times = held.communicated // report.elements if report.elements else 0
        yield (
            f"  the paper's communication of this stage: {times} Psi = {held.communicated:,} "
            "elements per step"
        )
    for name, size in (("buckets", held.bucket), ("buffers", held.buffer)):
        if size:
            yield f"  next to it, {name} of {binary(size)} stay"


def _reserved(report: MemoryReport) -> str:
    """Say what the caching allocator of a GPU would take for it."""
    held = report.reserved
    if held is None:
        return f"reserved by the caching allocator of a GPU: not modelled, {report.unreserved}"
    more = held.default - held.allocated
    words = (
        f"reserved by the caching allocator of a GPU: {binary(held.default)}, of which "
        f"{binary(more)} are unused at its peak; {binary(held.expandable)} with "
        "expandable_segments:True"
    )
    if held.building > held.default:
        words += f"; {binary(held.building)} if the whole model is built on the device first"
    return words


def _peak(report: MemoryReport) -> Iterator[str]:
    yield f"peak: {binary(report.peak.total)} {where(report.peak)}"
    yield from _terms(report.peak)
    yield _reserved(report)
    yield ""
    rows = [
        [
            row.phase,
            row.module or "(outside of modules)",
            _short(row.held.total)
            if row.lowest == row.held.total or not row.module.endswith("*")
            else f"{_short(row.lowest)} to {_short(row.held.total)}",
            ", ".join(f"{_named(c)} {_short(size)}" for c, size in _main(row.held)),
        ]
        for row in report.rows
    ]
    yield tabulate(
        rows,
        headers=["phase", "module", "peak within", "most of it"],
        colalign=["left", "left", "right", "left"],
        disable_numparse=True,
    )


def _terms(held: HeldBytes) -> Iterator[str]:
    for category in CATEGORIES:
        if size := held.bytes.get(category):
            yield f"  {_named(category):<18}{_short(size):>12}"


def _host(host: HostMemory) -> Iterator[str]:
    yield f"memory of the host: peak {binary(host.peak.total)} {where(host.peak)}"
    yield from _terms(host.peak)
    if host.rounded:
        yield (
            f"with {binary(host.rounded)} by which torch rounds pinned tensors up to powers of two "
            f"it takes {binary(host.taken)}; without them where PYTORCH_ALLOC_CONF has "
            "pinned_max_round_threshold_mb:1"
        )
    yield (
        f"copied in a step: {binary(host.to_device)} to the device, {binary(host.to_host)} to the "
        "host; the optimizer runs there"
    )
    yield "of each rank: a host has as many times that as it has ranks"


def _main(held: HeldBytes) -> list[tuple[Category, int]]:
    return sorted(held.bytes.items(), key=lambda one: -one[1])[:3]


def _device(device: Device) -> Iterator[str]:
    verdict = device.verdict
    if device.over is not None:
        over = device.over
        yield f"OUT OF MEMORY at {binary(verdict.limit)}: {where(over)}"
        before = over.total - over.asked
        if over.phase != "built":
            yield f"  it asks for {binary(over.asked)} while {binary(before)} are held; with it:"
        yield from _terms(over)
    yield from words_of(verdict)
    if device.stages:
        yield ""
        yield "  by the formulas, with the activations and temporaries of this run, by the peak:"
        for stage, size in device.stages.items():
            fits = "fits" if size <= room(verdict.limit) else "does not fit"
            yield f"  stage {stage}  {binary(size):>12}  {fits}"
        yield f"  {asked(device)}"


def _briefly(verdict: MemoryVerdict) -> str:
    held = verdict.reserved
    fits = "fits" if verdict.fits else "does not fit"
    if held is None or verdict.by_peak:
        by = " by the peak" if verdict.fits else ""
        return f"peak {binary(verdict.peak)}, {fits}{by}"
    if verdict.expandable:
        return f"reserved {binary(held.expandable)} with expandable segments, {fits} with them"
    return f"reserved {binary(held.default)}, {fits}"


def asked(device: Device) -> str:
    """Return a sentence on the stage that the bottleneck needs."""
    return ASKED.get(
        device.asks,
        "no stage is enough: activations and temporaries must shrink, or ranks be added",
    )


ASKED: dict[int | None, str] = {
    0: "all of it fits on every rank: stage 0 (DDP) will do",
    1: "optimizer states are too much for one rank: stage 1",
    2: "gradients and optimizer states are too much for one rank: stage 2",
    3: "parameters, gradients and optimizer states are too much: stage 3",
}


def where(held: HeldBytes) -> str:
    """Describe step, phase, module and operator."""
    if held.phase == "built":
        return "while the model is built"
    inside = f" in {held.module}" if held.module else ", outside of modules"
    again = ", in the forward that runs again" if held.recomputed else ""
    return f"in step {held.step}, {held.phase}, at {held.operator}{inside}{again}"


def _named(category: str) -> str:
    return "temporary" if category == "other" else category


def _short(size: float) -> str:
    return binary(size) if size else "-"
