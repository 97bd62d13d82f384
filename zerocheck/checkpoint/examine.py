"""Examination of one checkpoint: all errors that show without another to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .contents import MODEL, NUMBER, OTHER, Contents, contents_of
from .formats import open_checkpoint
from .result import EXAMINED, UNREAD, CheckpointProblem, CheckpointReport
from .tiling import problems
from .values import MOMENTS, ValueChecks


def examine(path: Path) -> CheckpointReport:
    """Examine the checkpoint at a path. Raises UsageError for a path without one."""
    return report_on(contents_of(path, open_checkpoint(path)))


def report_on(contents: Contents) -> CheckpointReport:
    """Report what is wrong with a checkpoint alone."""
    findings = list(contents.source.findings)
    broken: set[tuple[str, str]] = set()
    for spot, item in contents.items.items():
        for problem in problems(item.stored):
            broken.add(spot)
            findings.append(CheckpointProblem(check="tiling", where=item.label, detail=problem))
    findings += _steps(contents)
    findings += _steps_of_files(contents)
    findings += _moments(contents)
    values = ValueChecks(contents, broken)
    values.run()
    findings += values.findings
    unchecked = _unchecked(contents, values.bounded)
    order = [*EXAMINED, UNREAD]
    named = {one.where for one in findings}
    intact = Counter(item.role for item in contents.items.values() if item.label not in named)
    # A missing or damaged file is one finding, whatever was in it.
    gone = {one.where for one in findings if one.check in ("files", "readable")}
    findings = [one for one in findings if one.file not in gone]
    return CheckpointReport(
        checkpoints=(contents.described(),),
        findings=tuple(sorted(findings, key=lambda one: order.index(one.check))),
        checked=tuple(check for check in EXAMINED if check not in unchecked),
        unchecked=unchecked,
        notes=(*contents.notes, *_notes(contents, values.unknown)),
        verified=tuple(contents.source.verified),
        unverifiable=tuple(contents.source.unverifiable),
        intact=dict(intact),
        loads=_loads(contents),
    )


def _loads(contents: Contents) -> str:
    """Return where a checkpoint without a finding can be loaded, and what a load would not give."""
    text = contents.source.loads
    if not contents.optimized():
        text += "; there is no state of an optimizer, so training would begin with a new one"
    elif contents.numbered:
        text += "; the optimizer must have its parameters in the same order"
    return text


def _steps(contents: Contents) -> Iterator[CheckpointProblem]:
    """Check that every step count is a whole number from 1 on, and that all are equal."""
    for name, value in contents.odd_steps.items():
        if value != "damaged":  # the reading of it says that
            yield CheckpointProblem(check="steps", where=f"step {name}", detail=f"it is {value}")
    for name, step in contents.steps.items():
        if not (step >= 1 and step % 1 == 0):
            yield CheckpointProblem(check="steps", where=f"step {name}", detail=f"it is {step:g}")
    counted = Counter(contents.steps.values())
    if len(counted) < 2:
        return
    usual = max(counted, key=lambda step: (counted[step], step))
    for name, step in contents.steps.items():
        if step != usual:
            yield CheckpointProblem(
                check="steps",
                where=f"step {name}",
                detail=f"it is {step:g}, and {usual:g} for {counted[usual]} of "
                f"{len(contents.steps)} parameters; right only if {name} was frozen or without "
                "a gradient for some steps",
            )


def _steps_of_files(contents: Contents) -> Iterator[CheckpointProblem]:
    """Find files whose parameters all have another step count than those of the other files."""
    by_file: dict[str, set[float]] = {}
    for name, step in contents.steps.items():
        item = contents.items.get(("step", name))
        for file in contents.source.files_of(item.key) if item is not None else ():
            by_file.setdefault(file, set()).add(step)
    alone = {file: next(iter(steps)) for file, steps in by_file.items() if len(steps) == 1}
    if len(alone) < len(by_file) or len(set(alone.values())) < 2:
        return
    counts = ", ".join(f"{file} {step:g}" for file, step in sorted(alone.items()))
    yield CheckpointProblem(
        check="files",
        where="all",
        detail=f"they are of different saves: each has one step count ({counts})",
    )


def _moments(contents: Contents) -> Iterator[CheckpointProblem]:
    """Check that every parameter with a moment or a step has both moments, of its shape.

    Only of an optimizer that has such moments: one of the family of Adam, known by its setting
    amsgrad, has both, and of another those that occur. max_exp_avg_sq is for all or none
    of the parameters of a group with amsgrad, and momentum_buffer is SGD's.
    """
    model = contents.named(MODEL)
    adam = any("amsgrad" in settings for settings in contents.settings.values())
    roles = [role for role in MOMENTS if contents.named(role) or (adam and role in MOMENTS[:2])]
    stepped = {*contents.steps, *contents.odd_steps}
    for name in contents.optimized():
        unknown = name not in model and not name.startswith(NUMBER)
        if model and unknown and not _in_parts(contents, name):
            yield CheckpointProblem(
                check="moments", where=name, detail="it has optimizer state, and no parameter"
            )
        has = [role for role in roles if (role, name) in contents.items]
        for role in roles:
            item = contents.items.get((role, name))
            parameter = model.get(name)
            if item is None:
                if _must_have(contents, name, role, has):
                    yield CheckpointProblem(
                        check="moments", where=f"{role} {name}", detail="it is missing"
                    )
            elif parameter is not None and item.stored.shape != parameter.stored.shape:
                yield CheckpointProblem(
                    check="moments",
                    where=item.label,
                    detail=f"its shape is {list(item.stored.shape)}, its parameter's "
                    f"{list(parameter.stored.shape)}",
                )
        if stepped and has and name not in stepped:
            yield CheckpointProblem(check="moments", where=f"step {name}", detail="it is missing")


def _in_parts(contents: Contents, name: str) -> list[str]:
    """Return the tensors that the model has in place of a parameter of the optimizer."""
    tensors = [item.stored.numel for item in contents.items.values() if item.name == name]
    return contents.parts_of(name, max(tensors, default=0), {*contents.optimized()})


def _must_have(contents: Contents, name: str, role: str, has: list[str]) -> bool:
    if role == "max_exp_avg_sq":
        return contents.settings.get(name, {}).get("amsgrad") is True
    return bool(has) or name in contents.steps


def _unchecked(contents: Contents, bounded: int) -> dict[str, str]:
    """Return the checks that nothing could fail, and why."""
    unchecked: dict[str, str] = {}
    if not contents.items:
        unchecked |= dict.fromkeys(("tiling", "finite"), "no tensor was found")
    if not contents.named("exp_avg_sq"):
        unchecked["nonnegative"] = "no exp_avg_sq"
    if not contents.steps and not contents.odd_steps:
        unchecked["steps"] = "no step counts"
    moments = contents.named("exp_avg") or contents.named("exp_avg_sq")
    if not moments and not contents.named("momentum_buffer"):
        unchecked["moments"] = unchecked["bounded"] = "no optimizer state with moments"
    elif not bounded:
        unchecked["bounded"] = "it needs both moments, betas and a step of a parameter"
    return unchecked


def _notes(contents: Contents, not_finite: list[str]) -> Iterator[str]:
    optimized = set(contents.optimized())
    members = [name for name in contents.settings if name not in optimized]
    if optimized and members:
        yield f"in a param group, and without state, so never stepped: {_some(members)}"
    model = contents.named(MODEL)
    known = optimized | set(members)
    for name in optimized - model.keys():
        if parts := _in_parts(contents, name):
            yield f"the model has {name} in parts, which are not compared: {_some(parts)}"
            known |= {*parts}
    left = [name for name in model if name not in known]
    if optimized and left and not contents.numbered:
        yield f"unknown to the optimizer, so buffers or frozen: {_some(left)}"
    others = [name for name in contents.named(OTHER) if name not in not_finite]
    if others:
        yield f"of unknown role, checked for values that are not finite: {_some(others)}"
    if not_finite:
        yield f"numbers of unknown role that are not finite: {_some(not_finite)}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
