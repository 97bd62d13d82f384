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

    given: fields that the user named. Raises UsageError as `check_fixed` does.
    """
    values: dict[str, Any] = fixed_values(setup)
    made = replace(setup, **{name: one for name, one in values.items() if name not in given})
    check_fixed(made)
    return made


def check_fixed(setup: Setup) -> None:
    """Raise UsageError where the setup says otherwise than what its implementation fixes."""
    for name, value in fixed_values(setup).items():
        if getattr(setup, name) != value:
            raise UsageError(
                f"--{name} {getattr(setup, name)}: {setup.implementation} has {value}; leave one "
                "of the two out"
            )


def fixed_values(setup: Setup) -> dict[str, object]:
    """Return the fields of a setup that its implementation fixes, with their values.

    Raises UsageError for an optimizer class of the user's.
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
    return {name: value for name, value in values.items() if value is not None}


def _value(name: str, fixed: Mapping[str, Any]) -> Any:
    section, field = _PLACES[name]
    value = fixed.get(section, {}).get(field)
    return _PRECISIONS.get(value) if name == "precision" else value
