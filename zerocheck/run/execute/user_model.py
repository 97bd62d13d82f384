"""User's own model as that of every case: `--model`, or `fixed = {"model": ...}`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...case.codec import to_plain
from ...case.schema import Case, Model, UserModel
from ...case.validity import check
from ...catalogue import check_factory
from ...errors import UsageError
from ...machine.devices import CPU
from ...protocol.replies import Description
from ...protocol.verdicts import Obligation
from ..plan.options import RunOptions
from .rank_pool import RankPool
from .rank_requests import look


def with_models(
    ranks: RankPool, described: Mapping[str, Description], options: RunOptions
) -> tuple[dict[str, Description], dict[Obligation, str]]:
    """Add the user's model to the fixed fields that the implementations declare.

    Returns them with the obligations that then cannot be exercised at all, each with the reason.
    Each model is looked at once, in a rank process. Raises UsageError for one that cannot be
    judged, that does not go with what an implementation fixes, or with what is to be checked.
    """
    size = min(options.world_sizes)
    looked: dict[str, UserModel] = {}
    found = {}
    for name, one in described.items():
        factory = _factory(name, one.fixed, options.model)
        if factory is None:
            found[name] = one
            continue
        if factory not in looked:
            looked[factory] = look(ranks, factory, world_size=size)
        model = to_plain(Case(model=Model(user=looked[factory])))["model"]
        fixed = {**one.fixed, "model": {"user": model["user"]}}
        # What it says of buffers is of the batch norms of drawn models.
        without = {key: why for key, why in one.without.items() if key != "buffers"}
        found[name] = msgspec.structs.replace(one, fixed=fixed, without=without)
    return found, _without(options, found, looked)


def case_with(ranks: RankPool, case: Case, factory: str, *, world_size: int) -> Case:
    """Replace the user's model in a case by that which the factory makes now.

    Raises UsageError where the rest of the case does not go with it.
    """
    user = look(ranks, factory, world_size=world_size)
    case = msgspec.structs.replace(case, model=msgspec.structs.replace(case.model, user=user))
    check(case)
    return case


def _without(
    options: RunOptions, described: Mapping[str, Description], looked: Mapping[str, UserModel]
) -> dict[Obligation, str]:
    """Return the obligations that cannot be exercised, with the reasons.

    They are `buffers`, where every case has a model of the user's without any, and those that
    cannot be judged on the device.
    """
    without = _undeclared(options)
    if not set(options.obligations) - set(without):
        name, reason = next(iter(without.items()))
        raise UsageError(f"--obligations {name}: {reason}")
    fixed = all("user" in _fields(one.fixed.get("model")) for one in described.values())
    if not fixed or "buffers" not in options.obligations:
        return without
    if any(user.buffers for user in looked.values()):
        return without
    reason = f"{', '.join(looked)} has no buffers"
    if options.obligations == ("buffers",):
        raise UsageError(f"--obligations buffers: {reason}, so there is nothing to check")
    return {**without, "buffers": reason}


PEAK_ON_GPU = (
    "what a GPU holds within a step depends on workspaces that its libraries choose, and on when "
    "streams let go of memory: no layout can say it (on the cpu it is checked)"
)


def _undeclared(options: RunOptions) -> dict[Obligation, str]:
    if options.device == CPU or "peak" not in options.obligations:
        return {}
    return {"peak": PEAK_ON_GPU}


def _fields(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _factory(name: str, fixed: Mapping[str, object], asked: str | None) -> str | None:
    """Return the model that an implementation is checked with, or None for drawn ones."""
    model = fixed.get("model")
    if model is None:
        return asked
    if isinstance(model, str):
        check_factory(model)
        if asked is not None and asked != model:
            raise UsageError(f"--model {asked}: {name} has the model {model} of its own (fixed)")
        return model
    if asked is not None and model:
        fields = model
        if isinstance(model, Mapping):
            fields = ", ".join(f"model.{field}" for field in model)
        raise UsageError(
            f"--model {asked}: {name} fixes {fields}, which only drawn models have; leave one of "
            "the two out"
        )
    return asked
