"""A script of torch alone that shows the fault of a case, to be attached to an upstream issue."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ..adapters.shared.script_text import (
    AdapterScript,
    ShardingText,
    group_options,
    grouped,
    optimizer_call,
    quoted,
)
from ..case.schema import Case
from ..case.shapes import draws_random, sometimes_used, uncalled
from ..catalogue import BUILT_IN, apart, extra_of, is_built_in, part_of
from ..contract.groups import learning_rates
from ..errors import UsageError
from ..optimizers import NAMES_BY_EQUATIONS, optimizer_of
from ..run.records.records import CaseFile
from .checks import Check, checks_of, margin, steps_of
from .model import model_text, samples
from .source import imports, prose, words
from .user import user_sharding

LONGEST = 80
"""Lines of a script. What takes more is no small example any more."""

WRITTEN = "Written by zerocheck"
"""Words in the docstring of every script. A file without them is not overwritten."""

HANG_SECONDS = 20
"""How long the ranks of a script wait for each other where the fault is a hang."""

SCALES = {"zero": 0.0, "typical": 0.1, "tiny": 1e-12, "huge": 1e6}
"""Size of gradients that a start in mid-training follows from."""


def write_script(path: Path, text: str) -> None:
    """Write it.

    Raises UsageError for a file that is there and is no script of zerocheck.
    """
    try:
        if path.exists() and WRITTEN not in path.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(
                f"{path} is there already and was not written by zerocheck; name another file"
            )
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def script_of(file: CaseFile, *, implementation: str | None = None) -> str:
    """Return the script of a case file, at most LONGEST lines.

    implementation: shard by this one instead of that of the file. Raises UsageError, with the
    feature that is in the way, where such a script cannot be written.
    """
    name, case = implementation or file.implementation, file.case
    if apart(name)[1]:
        raise UsageError(
            f"no script for {name}: an injected fault is not written as a script; "
            "`zerocheck replay` without --script runs it"
        )
    given = scripts().get(name)
    sharding = _sharding(name, given, case)
    replicated = sharding.gather == "replicated"
    checks, steps = checks_of(file, replicated=replicated), steps_of(file)
    found = list(reasons(case))
    if given is not None:
        found += given.reasons(case, checks, steps)
    elif case.training.loss_scale:
        found.append("the scaler of its losses is one of your code (training.loss_scale)")
    if given is None and case.training.unfreeze is not None:
        found.append(
            "parameters are unfrozen after the first step, and zerocheck tells your code which "
            "(training.unfreeze)"
        )
    optimizer = optimizer_of(case.optimizer)
    if len(optimizer.rules) > 1:
        found.append("it has two optimizers (optimizer.kind)")
    elif any(rule.itself for rule in optimizer.rules):
        found.append(
            f"scripts are written for {NAMES_BY_EQUATIONS}, it has {optimizer.name} "
            "(optimizer.kind)"
        )
    if found:
        raise UsageError(
            f"no script of torch alone for this case: {'; '.join(found)}; "
            "`zerocheck replay` without --script runs it"
        )
    body = _rendered(file, name, sharding, checks, steps, users_code=given is None)
    text = body.replace("@imports@", imports(body))
    lines = text.count("\n")
    if lines > LONGEST:
        raise UsageError(
            f"the script would have {lines} lines, {LONGEST} are allowed: {_longest(case)}; "
            "a shrunk case (`zerocheck run` without --no-shrink) is shorter"
        )
    return text


def scripts() -> dict[str, AdapterScript]:
    """Return the implementations that a script can show, by name."""
    found: dict[str, AdapterScript] = {}
    for name in BUILT_IN:
        part: Any = part_of(name, "script")
        if part is not None:
            found[name] = part.SCRIPTS[name]
    return found


def _sharding(name: str, given: AdapterScript | None, case: Case) -> ShardingText:
    if given is not None:
        sharding = given.text(case)
        if case.training.loss_scale is not None:
            scale = case.training.loss_scale
            sharding.scaler = f'{sharding.scaler_class}("cpu", init_scale={scale!r})'
    else:
        _check_user_code(name)
        sharding = user_sharding(name, case)
    if case.training.microbatches == 1 or case.sharding.sync == "each":
        sharding.sync = ""
    return sharding


def _check_user_code(name: str) -> None:
    """Raise UsageError for code that a script of torch alone cannot have."""
    takes = f"--script takes {', '.join(scripts())} and path/to/file.py:function"
    if extra_of(name):
        raise UsageError(
            f"{name} needs {extra_of(name)}, which a script of torch alone cannot have; {takes}"
        )
    if is_built_in(name) or ":" not in name or name.startswith("zerocheck."):
        raise UsageError(
            f"{name} is zerocheck's own code, or its adapter has no script.py; {takes}"
        )


def _rendered(
    file: CaseFile,
    name: str,
    sharding: ShardingText,
    checks: tuple[Check, ...],
    steps: int,
    *,
    users_code: bool,
) -> str:
    """Render the script. users_code: the user's code shards the model."""
    case, training = file.case, file.case.training
    several = training.microbatches > 1
    model = model_text(case, listed=users_code)
    constants: list[str] = []
    factors = _factors(case, steps)
    optimizes = _optimizes(sharding, case, checks, steps) or users_code
    if not optimizes:
        sharding = replace(sharding, setup=sharding.wrap)
    clip = single_clip = ""
    if training.clip is not None:
        given = {
            "maximum": repr(training.clip),
            "norm": ', norm_type=float("inf")' if training.norm == "inf" else "",
        }
        clip = sharding.clip.format(**given)
        single_clip = f"nn.utils.clip_grad_norm_(single.parameters(), {'{maximum}{norm}'})"
        single_clip = single_clip.format(**given)
    flat_names = sharding.flat if len(sharding.flat) > 0 and checks else []
    if flat_names:
        constants.append(f"NAMES = {words(map(quoted, flat_names))}")
    if factors:
        constants += [f"FACTORS = {factors!r}  # of the learning rate"]
    if grouped(case):
        constants.append(_options(case))
    return _template().render(
        header=_header(file, name, sharding),
        world_size=case.world_size,
        steps=steps,
        several=several,
        optimizes=optimizes,
        holds=training.unfreeze is not None and bool(checks) and sharding.replaces_frozen,
        microbatches=training.microbatches,
        margin=margin(case, checks),
        constants=constants,
        sharding=sharding,
        sharded=sharding.sharded and case.world_size > 1,
        classes=model.classes,
        build=model.build,
        samples=samples(case),
        grouped=grouped(case),
        unfreeze=training.unfreeze,
        start=_start(case),
        checks=checks,
        init=_init(file),
        single_optimizer=optimizer_call(case, "single", fused=False),
        flat_names=flat_names,
        absent=sharding.gather != "flat" and _absent(case),
        factors=factors,
        set_to_none=training.set_to_none,
        clip=clip,
        single_clip=single_clip,
        repeated=steps > 1,
        failure=_failure(file),
    )


def _header(file: CaseFile, name: str, sharding: ShardingText) -> list[str]:
    title = file.title or "what is compared differs from training without sharding"
    if file.implementation != name:
        title = f"the case in which {file.implementation} failed"
    torch = file.environment.torch.partition("+")[0]
    does = {
        "crashed": "Exits with 1 if the ranks fail in this way, with 0 if they do not.",
        "hung": "Exits with 1 if a rank waits too long for the others, with 0 if none does.",
    }.get(
        file.status,
        "Exits with 1 and prints what is off if a rank differs from one process that has the "
        "samples of all ranks; else with 0.",
    )
    origin = f"{WRITTEN} {file.environment.zerocheck}; needs torch alone. {does}"
    first, *rest = prose(f"{sharding.title} in torch {torch}: {title.rstrip('.')}.", width=97)
    return [first, *rest, "", *prose(origin)]


def _init(file: CaseFile) -> str:
    given = ['"gloo"', 'f"file://{store}"', "rank=rank", "world_size=WORLD_SIZE"]
    if file.status == "hung":
        given.append(f"timeout=timedelta(seconds={HANG_SECONDS})")
    return f"dist.init_process_group({', '.join(given)})"


def _failure(file: CaseFile) -> str:
    """Return a literal: words of the ranks' failure, or "" where nothing of it is expected."""
    if file.status == "hung":
        return quoted("process")  # however the rank ends that waited too long
    if file.status != "crashed":
        return ""
    text = file.title.partition(":")[2].strip()
    error, _, message = text.partition(":")
    words = re.split(r'["\'\d/\\]', message.strip(), maxsplit=1)[0].strip() or error.strip()
    return quoted(words[:60])


def _optimizes(text: ShardingText, case: Case, checks: tuple[Check, ...], steps: int) -> bool:
    """Return True if the script needs an optimizer.

    It does not for one gradient, unless the construction of the optimizer is the fault.
    """
    training = case.training
    if steps > 1 or checks not in (("gradient",), ("loss",)):
        return True
    if training.loss_scale is not None or training.unfreeze is not None:
        return True
    return case.sharding.optimizer_first or text.checks_optimizer


def _absent(case: Case) -> bool:
    """Return True if a parameter may have no gradient."""
    model = case.model
    return bool(uncalled(model) or sometimes_used(model) or model.frozen)


def _start(case: Case) -> dict[str, Any] | None:
    if case.start.step == 0:
        return None
    (optimizer,), scale = optimizer_of(case.optimizer).rules, SCALES[case.start.moments]
    roles = optimizer.states_with(case.optimizer)
    step = float(case.start.step) if optimizer.counts_steps else None
    if not roles and step is None:
        return None
    return {"step": step, "states": {role: optimizer.size_of(role, scale) for role in roles}}


def _factors(case: Case, steps: int) -> tuple[float, ...]:
    """Return the learning rate at each step, over that of the group."""
    if case.optimizer.schedule == "constant":
        return ()
    first = next((group.lr for group in case.optimizer.groups if group.lr), 1.0)
    place = [group.lr for group in case.optimizer.groups].index(first)
    return tuple(learning_rates(case, index)[place] / first for index in range(steps))


def _options(case: Case) -> str:
    """Return the groups, as {pattern: options}."""
    parts = []
    for group in case.optimizer.groups:
        given = [option.split("=", 1) for option in group_options(case, group)]
        inside = ", ".join(f'"{key}": {value}' for key, value in given)
        parts.append(f"{quoted(group.pattern)}: {{{inside}}}")
    return f"OPTIONS = {{{', '.join(parts)}}}"


def _longest(case: Case) -> str:
    """Return the features of the model that take most lines."""
    kinds = {block.kind for block in case.model.blocks}
    named = [f"{len(case.model.blocks)} blocks ({', '.join(sorted(kinds))})"] if kinds else []
    if grouped(case):
        named.append(f"{len(case.optimizer.groups)} parameter groups")
    if case.start.step:
        named.append("a start in mid-training")
    if case.training.clip is not None:
        named.append("clipping")
    return "the case has " + ", ".join(named or ["many features"])


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerocheck.script", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    return environment.get_template("script.py.j2")


def reasons(case: Case) -> Iterator[str]:
    """Yield why a script of the case would be too long, or not the same; nothing if neither."""
    if case.model.user is not None:
        yield "the model is the user's own (model.user)"
    if case.axes.has("replicate"):
        yield "the mesh has 2 axes"
    if case.hosts:
        yield "its ranks are told that they are on several hosts (hosts)"
    if case.precision.compute != "fp32" or case.precision.reduce != "fp32":
        yield "it computes or reduces in another dtype than fp32 (precision)"
    if any(block.dtype != "fp32" for block in case.model.blocks):
        yield "a block has bf16 parameters, whose round-off has other bounds (model.blocks.dtype)"
    if any(block.empty for block in case.model.blocks):
        yield "parameters without elements (model.blocks.empty)"
    if case.resume:
        yield "it saves and loads a checkpoint (resume)"
    if case.training.overflow is not None:
        yield "a step overflows on purpose (training.overflow)"
    if case.training.compile != "none":
        yield "it compiles the model, and bounds are then estimated (training.compile)"
    if case.axes.has("tp"):
        yield (
            "its layers are sharded over the axis tp, and bounds are then estimated "
            "(sharding.tensor_parallel)"
        )
    if case.disturbance.delay:
        yield "it needs delays, which show a race in some runs only (disturbance.delay)"
    if case.data.rng == "carried" and draws_random(case.model):
        yield "dropout takes random numbers that each rank carries on (data.rng)"
