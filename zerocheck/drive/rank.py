"""Execution of a job in a rank process: the target of the rank pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..case.capabilities import CAPABILITIES, required, required_axes
from ..case.measurement import unmeasured
from ..case.mesh import AXES
from ..case.options import defaults
from ..case.schema import Case, Sharding
from ..case.shapes import sometimes_used
from ..catalogue import INJECTED, PLANTING, apart, installed
from ..compat_memory import quiet_profiler
from ..contract import loading
from ..contract.implementation import Implementation
from ..contract.refusals import advise
from ..contract.semantics import Semantics
from ..errors import Unsupported, UsageError, unknown
from ..execution.kernels import deterministic
from ..machine.devices import CPU
from ..models.inspection import inspect_model
from ..optimizers.user.inspection import inspect_optimizer
from ..protocol.jobs import (
    Build,
    CaseJob,
    Describe,
    Job,
    LoadCheckpoint,
    LookAtModel,
    LookAtOptimizer,
    Measure,
    Observe,
    SegmentJob,
    Supports,
    TakeSteps,
)
from ..protocol.replies import (
    CaseReply,
    CaseUnsupported,
    Description,
    ModelLook,
    OptimizerLook,
    Refusals,
    Reply,
)
from ..session_objects import receive_session_code
from ..user_code import import_user_code
from .checkpoints import NO_CHECKPOINTS, Checkpoints, kept, resumes
from .collectives import CollectiveTrace
from .leaks.guard import LeakSink, StateGuard
from .leaks.patches import all_code
from .leaks.places import StateKind
from .recorder import Recorder, Store
from .steps import Driver, restores

_injected: dict[str, type[Implementation]] = {}
_meshes: dict[tuple[object, ...], DeviceMesh] = {}
_guards: list[StateGuard] = []
"""The one of this process."""
_inherited: list[StateKind] = []
"""The clean code of the process that this one was forked from, if any."""


class ProgressPage(Protocol):
    """Progress page of the rank."""

    def at(self, text: str) -> None: ...
    def collective(self, name: str, sequence: int) -> None: ...


class Context(Protocol):
    """Context that the pool passes to a job."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def arena(self) -> Store: ...
    @property
    def progress(self) -> ProgressPage: ...
    @property
    def condition(self) -> LeakSink: ...


def prepare(session_code: bytes) -> None:
    """Do once what all ranks would do, in the process that they are forked from.

    session_code: objects that no file has, see session_objects.py.
    """
    receive_session_code(session_code)
    installed()
    _inherited[:] = all_code()


def run(payload: bytes, context: Context) -> bytes:
    """Do one job (msgpack of Job); return msgpack of its reply (Reply).

    Raises whatever the implementation raises; the pool reports it. Global state that the job
    changed is put back; the context says what that was.
    """
    job: Job = msgspec.msgpack.decode(payload, type=Job)
    if not _guards:
        deterministic(torch.device(context.device))
        quiet_profiler()  # an environment variable, which is no leak of a job
        inherited = _inherited if context.device == CPU else ()  # starting a GPU replaces code
        _guards.append(StateGuard(inherited))
    with _guards[0].around(_imports(job), context.condition):
        return msgspec.msgpack.encode(_reply(job, context))


def _imports(job: Job) -> list[tuple[str, Callable[[], object]]]:
    """Return the names of the user's code that a job imports, with the function to import each."""
    if isinstance(job, LookAtModel):
        return [(job.factory, partial(import_user_code, job.factory))]
    if isinstance(job, LookAtOptimizer):
        return [(job.location, partial(import_user_code, job.location))]
    names: list[tuple[str, Callable[[], object]]] = [
        (job.implementation, partial(load, job.implementation))
    ]
    if isinstance(job, Describe | Supports):
        return names
    model, optimizer = job.case.model.user, job.case.optimizer.user
    places = [model.factory if model is not None else "", optimizer.location if optimizer else ""]
    names += [(place, partial(import_user_code, place)) for place in places if place]
    return names


def _reply(job: Job, context: Context) -> Reply:
    match job:
        case Describe():
            return _describe(job.implementation)
        case LookAtModel():
            device = torch.device(context.device)
            return _look(job.factory, device) if context.rank == 0 else ModelLook()
        case LookAtOptimizer():
            return _inspected(job.location) if context.rank == 0 else OptimizerLook()
        case Supports():
            return _refusals(job)
        case _:
            return _run_case(job, context)


def load(name: str) -> type[Implementation]:
    """Load the class of an implementation, with the faults that its name injects.

    Raises UsageError, with what is missing and where, if it cannot be used.
    """
    parent, fault = apart(name)
    if not fault:
        return loading.load(name)
    if name not in _injected:
        planted: Any = _named(PLANTING)
        _injected[name] = planted(load(parent), fault, _named(INJECTED[fault]))
    return _injected[name]


def _named(place: str) -> Any:
    """Import "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _look(name: str, device: torch.device) -> ModelLook:
    deterministic(device)
    try:
        return ModelLook(model=inspect_model(name, device))
    except UsageError as error:
        return ModelLook(error=str(error))


def _inspected(location: str) -> OptimizerLook:
    try:
        return OptimizerLook(optimizer=inspect_optimizer(location))
    except UsageError as error:
        return OptimizerLook(error=str(error))


def _describe(name: str) -> Description:
    try:
        implementation = load(name)
        _check_declared(name, implementation)
        _check_words(name, "capabilities", implementation.capabilities, CAPABILITIES)
        _check_words(name, "axes", implementation.axes, AXES)
        kept(name, implementation)
        # Only plain data can be merged into a case.
        msgspec.json.encode(dict(implementation.fixed))
        options = _options(name, implementation)
    except UsageError as error:
        return Description(error=str(error))
    except TypeError as error:
        return Description(error=f"{name}: `fixed` must be plain data: {error}")
    return Description(
        semantics=_semantics(implementation),
        fixed=dict(implementation.fixed),
        without=_without(implementation),
        restores=restores(implementation),
        resumes=resumes(implementation),
        options=options,
        exchanges=tuple(implementation.exchanges),
        capabilities=tuple(one for one in CAPABILITIES if one in implementation.capabilities),
        axes=tuple(one for one in AXES if one in implementation.axes),
    )


def _without(implementation: type[Implementation]) -> dict[str, str]:
    """Return the obligations that no case of the implementation can exercise, with the reason."""
    training = implementation.fixed.get("training", {})
    unclipped = isinstance(training, Mapping) and training.get("clip", 1.0) is None
    fixed = {"clip": "fixed has training.clip None"} if unclipped else {}
    return {**fixed, **implementation.without}


def _options(name: str, implementation: type[Implementation]) -> tuple[str, ...] | None:
    """Return the options that it obeys. Raises UsageError for an unknown one."""
    if implementation.options is None:
        return None
    known = [*(field.name for field in msgspec.structs.fields(Sharding)), *defaults()]
    for option in implementation.options:
        if option not in known:
            raise unknown(f"sharding field in {name}.options", str(option), known)
    return tuple(sorted(implementation.options))


def _semantics(implementation: type[Implementation]) -> dict[str, str]:
    declared = implementation.semantics
    return {name: str(getattr(declared, name)) for name in declared.__dataclass_fields__}


def _run_case(job: CaseJob, context: Context) -> CaseReply:
    case = job.case
    device = torch.device(context.device)
    deterministic(device)
    implementation = load(job.implementation)
    reason = _refusal(implementation, case)
    if reason is None and isinstance(job, Measure):
        reason = unmeasured(case)
    if reason is not None:
        return CaseUnsupported(reason)
    driver = Driver(
        implementation,
        case,
        _mesh(case, device.type),
        device=device,
        rank=context.rank,
        progress=context.progress,
        checkpoints=Checkpoints(
            case,
            job.checkpoints if isinstance(job, SegmentJob) else NO_CHECKPOINTS,
            rank=context.rank,
            device=device,
        ),
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(driver.delays.everywhere())
            if isinstance(job, Observe | LoadCheckpoint | Measure) and job.trace:
                # Within the delays, so that a collective is recorded where it is called.
                stack.enter_context(CollectiveTrace(context.progress.collective))
            match job:
                case Build():
                    return driver.built()
                case TakeSteps():
                    return driver.bare()
                case Observe():
                    return driver.observe_steps(Recorder(context.arena, case.optimizer))
                case LoadCheckpoint():
                    return driver.load_checkpoint(Recorder(context.arena, case.optimizer))
                case Measure():
                    return driver.measure_memory()
    except Unsupported as refusal:
        return CaseUnsupported(str(refusal))
    except Exception as error:
        reason = driver.refused(error)
        if reason is None:
            advise(error)
            raise
        return CaseUnsupported(reason)


def _check_declared(name: str, implementation: type[Implementation]) -> None:
    """Raise UsageError for a class attribute of a type other than the contract's."""
    for attribute, needed, kind in (
        ("semantics", "zerocheck.Semantics(...)", Semantics),
        ("fixed", "a mapping of case fields", Mapping),
        ("without", "a mapping of obligations to reasons", Mapping),
        ("capabilities", "a set of strings", Collection),
        ("axes", "a set of strings", Collection),
        ("keeps", "a tuple of strings", Collection),
        ("exchanges", "a tuple of strings", Collection),
        ("options", "a tuple of strings, or None", Collection | None),
    ):
        given = getattr(implementation, attribute)
        if not isinstance(given, kind):
            raise UsageError(f"{name}: `{attribute}` is {given!r:.60}; needed is {needed}")


def _check_words(name: str, attribute: str, given: Collection[str], known: Sequence[str]) -> None:
    """Raise UsageError for a class attribute that is no set of known strings."""
    if isinstance(given, str):
        raise UsageError(
            f"{name}: `{attribute}` is the string {given!r}; needed is a set of strings"
        )
    for one in given:
        if one not in known:
            raise unknown(f"word in {name}.{attribute}", one, known)


def _unhandled(implementation: type[Implementation], case: Case) -> str | None:
    """Return the reason to reject a feature that the implementation does not declare, or None."""
    user = case.optimizer.user
    late = case.training.unfreeze is not None or bool(sometimes_used(case.model))
    if user is not None and user.count == "group" and late:
        return (
            "its optimizer counts steps in the parameter group, and a parameter without a gradient "
            "takes none: there is no saying which count is right"
        )
    for capability, problem in required(case):
        if capability not in implementation.capabilities:
            return f"it does not declare that it handles {problem} (class attribute capabilities)"
    for axis in required_axes(case):
        if axis not in implementation.axes:
            return (
                f"it does not declare that it handles a mesh with the axis {axis!r} (class "
                "attribute axes)"
            )
    return None


def _refusal(implementation: type[Implementation], case: Case) -> str | None:
    """Return the reason to reject the case, or None. Raises the errors of `supports`."""
    reason = implementation.supports(case)
    if reason is not None and not isinstance(reason, str):
        raise TypeError(
            f"supports() returned {reason!r:.60}; it returns None, or the reason as a string"
        )
    in_mid_training = case.start.step > 0 or case.start.moments != "zero"
    if reason is None and in_mid_training and not restores(implementation):
        return "it has no restore(), so it cannot start in mid-training"
    if reason is None and case.resume and not resumes(implementation):
        return "it has no save() and load(), so it cannot be resumed"
    return reason or _unhandled(implementation, case)


def _refusals(job: Supports) -> Refusals:
    """Return the reasons of `supports` to reject candidates. Where it raises, the case is run."""
    implementation = load(job.implementation)
    numbers: dict[str, int] = {}
    of: list[int] = []
    for case in job.candidates:
        try:
            reason = _refusal(implementation, case)
        except Exception:
            reason = None
        of.append(0 if reason is None else numbers.setdefault(str(reason), 1 + len(numbers)))
    return Refusals(reasons=tuple(numbers), of=tuple(of))


def _mesh(case: Case, device: str = CPU) -> DeviceMesh:
    """Return the case's device mesh, made once per process group, with collectives.

    All are kept: each has process groups, which have threads and connections.
    """
    sizes, names = case.axes.sizes, case.axes.names
    key = (dist.group.WORLD, sizes, names, device)
    mesh = _meshes.get(key)
    if mesh is None:
        if any(world is not dist.group.WORLD for world, *_ in _meshes):
            _meshes.clear()
        mesh = _meshes[key] = init_device_mesh(device, sizes, mesh_dim_names=names)
    return mesh
