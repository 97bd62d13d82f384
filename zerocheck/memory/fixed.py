"""Fields that an implementation fixes, such as a user's config: in the setup, and in its case."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from .setup import OPTIMIZERS, Setup

_PLACES = {
    "microbatches": ("training", "microbatches"),
    "precision": ("precision", "compute"),
    "optimizer": ("optimizer", "kind"),
    "offload": ("sharding", "offload"),
}
"""Fields of a setup, and where a case has them."""

_PRECISIONS = {"bf16": "mixed", "fp32": "fp32"}
"""`precision.compute` of a case, and the precision of a setup."""


def with_fixed(setup: Setup, given: Collection[str]) -> Setup:
    """Return the setup with what its implementation fixes. Imports torch.

    given: fields that the user named. Raises UsageError where one says otherwise, and for an
    optimizer class of the user's.
    """
    fixed = setup.fixed
    values = {name: _value(name, fixed) for name in _PLACES}
    if values["offload"] == "pageable" and setup.traits.pinned:
        values["offload"] = "pinned"
    if values["optimizer"] not in (None, *OPTIMIZERS):
        raise UsageError(
            f"{setup.implementation} has an optimizer of its own ({values['optimizer']}), of which "
            f"no formula is known (allowed: {', '.join(OPTIMIZERS)})"
        )
    if values["optimizer"] == "sgd":
        values["momentum"] = fixed["optimizer"].get("momentum")
    for name, value in values.items():
        named = getattr(setup, name)
        if value is not None and name in given and named != value:
            raise UsageError(
                f"--{name} {named}: {setup.implementation} has {value}; leave one of the two out"
            )
    return replace(setup, **{name: one for name, one in values.items() if one is not None})


def _value(name: str, fixed: Mapping[str, Any]) -> Any:
    section, field = _PLACES[name]
    value = fixed.get(section, {}).get(field)
    return _PRECISIONS.get(value) if name == "precision" else value
