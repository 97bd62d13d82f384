"""The user's own model as that of every case: `--model`, or `fixed = {"model": ...}`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..case.codec import to_plain
from ..case.schema import Case, Model, UserModel
from ..case.validity import check
from ..catalogue import check_factory
from ..drive.observation import Described
from ..errors import UsageError
from .options import RunOptions
from .trial import Ranks, look


def with_models(
    ranks: Ranks, described: Mapping[str, Described], options: RunOptions
) -> dict[str, Described]:
    """What the implementations declare, with the user's model among the fixed fields.

    Each model is looked at once, in a rank process. Raises UsageError for one that cannot be
    judged, or that does not go with what an implementation fixes.
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
        found[name] = msgspec.structs.replace(one, fixed=fixed)
    return found


def case_with(ranks: Ranks, case: Case, factory: str, *, world_size: int) -> Case:
    """The case with the model that the factory makes now. Raises UsageError where it has none of
    the user's, or where the rest of the case does not go with what is made now."""
    if case.model.user is None:
        raise UsageError("--model: the case has a model of zerocheck's own; leave --model out")
    user = look(ranks, factory, world_size=world_size)
    case = msgspec.structs.replace(case, model=msgspec.structs.replace(case.model, user=user))
    check(case)
    return case


def _factory(name: str, fixed: Mapping[str, object], asked: str | None) -> str | None:
    """Which model an implementation is checked with, or None for drawn ones."""
    own = fixed.get("model")
    if own is None:
        return asked
    if isinstance(own, str):
        check_factory(own)
        if asked is not None and asked != own:
            raise UsageError(f"--model {asked}: {name} has the model {own} of its own (fixed)")
        return own
    if asked is not None and own:
        fields = ", ".join(f"model.{field}" for field in own) if isinstance(own, Mapping) else own
        raise UsageError(
            f"--model {asked}: {name} fixes {fields}, which only drawn models have; leave one of "
            "the two out"
        )
    return asked
