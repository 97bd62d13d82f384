"""Hypothesis strategies for cases, which are drawn as those of a run are, and which shrink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import assume
from hypothesis import strategies as st

from .case.capabilities import CAPABILITIES
from .case.codec import merged_fields
from .case.features import OF_RESUME
from .case.mesh import AXES
from .case.options import drawn_values
from .case.schema import Case
from .case.space import Asking, CaseSpace
from .errors import UsageError
from .run.plan.options import RunOptions
from .user_code import Nameable, importable_name

if TYPE_CHECKING:
    from .protocol.replies import Description


def cases(
    implementation: Nameable | None = None,
    *,
    world_sizes: Sequence[int] = (),
    features: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
    model: str | None = None,
    optimizer: str | None = None,
) -> st.SearchStrategy[Case]:
    """Strategy of the cases that an implementation supports.

    A failing case shrinks to few ranks, one step, one microbatch, and options at their default.

    implementation: a class or build function at the top of a module, or a name as on the command
    line; without one every case that zerocheck draws is there. world_sizes: numbers of ranks, those
    of `--profile quick` by default; features: only cases that have all of them, see `zerocheck
    list`; fixed: nested fields that are not drawn, such as {"training": {"clip": None}}; model:
    your own in every case, `path/to/file.py:factory`; optimizer: of every case, "sgd" or
    `path/to/file.py:Class`, a class of your own.

    Raises UsageError for arguments that cannot be used. The test raises it if no case has these
    features, or none is supported: the implementation is asked in rank processes, when the test
    starts.
    """
    for argument, given in (("world_sizes", world_sizes), ("features", features)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise UsageError(f"{argument} takes a list: {argument}=[{given!r}]")
    if not isinstance(fixed or {}, Mapping):
        raise UsageError(f'fixed is {fixed!r}; needed are nested fields such as {{"seed": 7}}')
    name = "" if implementation is None else importable_name(implementation)
    options = RunOptions(
        implementations=(name,) if name else (),
        world_sizes=tuple(world_sizes),
        features=tuple(features),
        model=model,
        optimizer=optimizer,
    )
    for feature in options.features:
        if feature in OF_RESUME:
            raise UsageError(
                f"feature {feature!r} is of cases with checkpoints, which cases() does not draw; "
                "`zerocheck run --obligations resume` does"
            )
    if model is not None and not name:
        raise UsageError(f"model {model!r} needs an implementation to look at it")
    if optimizer is not None and ":" in optimizer and not name:
        raise UsageError(f"optimizer {optimizer!r} needs an implementation to look at it")
    CaseSpace(options.world_sizes, (), fixed)  # contradictions are reported at once
    space = cache(lambda: _space_of(name, options, fixed or {}))
    return st.deferred(lambda: _cases(space()))


def _space_of(name: str, options: RunOptions, fixed: Mapping[str, Any]) -> CaseSpace:
    """Return the cases that the implementation supports, as its rank processes report."""
    from .catalogue import is_built_in
    from .protocol.replies import Description
    from .run.plan.fixed_fields import fixed_fields, meshes_of

    if name:
        described, ask = _asked(name, options)
    else:
        every = tuple(drawn_values())
        described, ask = (
            Description(options=every, restores=True, capabilities=CAPABILITIES, axes=AXES),
            _supports_all,
        )
    own = bool(name) and not is_built_in(name)
    both = merged_fields(fixed_fields(options, described, own=own), fixed)
    meshes = meshes_of(options, described)
    try:
        return CaseSpace(options.world_sizes, meshes, both, wanted=options.features, ask=ask)
    except UsageError as error:
        raise UsageError(f"{name or 'cases()'}: {error}") from None


def _asked(name: str, options: RunOptions) -> tuple[Description, Asking]:
    """Return an implementation's declarations, and what asks it whether cases are supported."""
    from .run.execute.environment import environment
    from .run.execute.rank_requests import describe, refusals
    from .run.execute.shared_ranks import shared_ranks
    from .run.execute.user_model import with_models
    from .run.execute.user_optimizer import with_optimizers
    from .run.findings.issue_matcher import KnownIssueMatcher
    from .run.known_issues.releases import Releases
    from .run.plan.plan import PlannedCase

    size = min(options.world_sizes)
    declared = {name: describe(shared_ranks(name), name, world_size=size)}
    described, _ = with_models(shared_ranks(name), declared, options)
    described = with_optimizers(shared_ranks(name), described, options.optimizer, world_size=size)
    matcher = KnownIssueMatcher(options, Releases.of(environment(options.device)))

    def ask(cases: Sequence[Case]) -> list[str | None]:
        reasons = refusals(shared_ranks(name), name, cases, world_size=size)
        return [
            reason or matcher.hang(PlannedCase(name, case))
            for case, reason in zip(cases, reasons, strict=True)
        ]

    return described[name], ask


def _supports_all(cases: Sequence[Case]) -> list[str | None]:
    return [None] * len(cases)


@st.composite
def _cases(choose: st.DrawFn, space: CaseSpace) -> Case:
    case = space.make(
        lambda n: choose(_below(n)),
        # What is drawn inside of one strategy is cut out as a whole when a case shrinks.
        part=lambda make: choose(st.builds(make)),
    )
    assume(case is not None)
    assert case is not None
    return case


@cache
def _below(n: int) -> st.SearchStrategy[int]:
    return st.integers(0, n - 1)


__all__ = ["Case", "cases"]
