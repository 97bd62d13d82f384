"""Limits of the cases of one implementation: fields that are not drawn, and the mesh axes."""

from __future__ import annotations

from collections.abc import Mapping

from ...case.capabilities import Capability
from ...case.features import COMPILED, OF_AXIS, OF_PRECISION
from ...case.mesh import INNER
from ...case.options import plain
from ...case.schema import MeshSizes
from ...errors import UsageError
from ...protocol.replies import Description
from .draws import mapping, replicas_asked
from .options import RunOptions
from .profiles import PROFILES

_UNDECLARED: tuple[tuple[Capability, frozenset[str], str, dict[str, object]], ...] = (
    ("precision", OF_PRECISION, "precision", {"compute": "fp32", "reduce": "fp32"}),
    ("compile", COMPILED, "training", {"compile": "none"}),
    ("past_wrapper", frozenset({"past-wrapper"}), "data", {"past_wrapper": False}),
)
"""Capabilities: the fields of cases without them, where no feature of them is asked for."""


def fixed_fields(
    options: RunOptions, described: Description, *, own: bool = False
) -> dict[str, object]:
    """Return the fields that all cases of the implementation must have.

    They are those that it fixes, and the defaults of those that it cannot handle. own: it is a
    user's, which has every inner axis often; tensor parallelism is slow.
    """
    fixed: dict[str, object] = dict(described.fixed)
    for section, fields in plain(described.options).items():
        fixed[section] = {**fields, **mapping(fixed.get(section))}
    if options.optimizer is not None:
        fixed["optimizer"] = _optimizer(options.optimizer, mapping(fixed.get("optimizer")))
    if options.hosts is not None:
        fixed["hosts"] = options.hosts
    if "compile-inductor" in options.features:  # it is not drawn: see COMPILES
        fixed["training"] = {"compile": "inductor", **mapping(fixed.get("training"))}
    if "compute-fp16" in options.features:  # it is not drawn: see case/precision.py
        precision = mapping(fixed.get("precision"))
        fixed["precision"] = {"compute": "fp16", "reduce": "fp32", **precision}
    if not described.restores:
        fixed["start"] = {**mapping(fixed.get("start")), "step": 0, "moments": "zero"}
    for capability, names, section, fields in _UNDECLARED:
        if capability not in described.capabilities and names.isdisjoint(options.features):
            fixed[section] = {**fields, **mapping(fixed.get(section))}
    for axis, field in INNER.items():
        unasked = axis not in described.axes and {*options.features}.isdisjoint(OF_AXIS[axis])
        if unasked or own or axis != "tp":
            size = 1 if unasked else "often"  # see mesh.Frequency
            fixed["sharding"] = {field: size, **mapping(fixed.get("sharding"))}
    if not options.features:  # a user who asks for them gets the reason
        without: dict[str, object] = {}
        if "loss_scale" not in described.capabilities:
            without |= {"loss_scale": None, "overflow": None, "overflow_in": None}
        if "unfreeze" not in described.capabilities:
            without["unfreeze"] = None
        if without:
            fixed["training"] = {**without, **mapping(fixed.get("training"))}
    return fixed


def _optimizer(asked: str, kind: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `optimizer` that an implementation fixes, with the kind asked for.

    Raises UsageError if it fixes another.
    """
    if ":" in asked:
        return dict(kind)  # see with_optimizers
    if kind.get("kind", asked) != asked:
        raise UsageError(
            f"--optimizer {asked}: an implementation has {kind['kind']} (fixed optimizer.kind); "
            "leave one of the two out"
        )
    return {**kind, "kind": asked}


def meshes_of(options: RunOptions, described: Description) -> list[MeshSizes]:
    """Meshes (R, S) that cases may have: the profile's, or all of the sizes asked for.

    None where the implementation does not handle them, but for who asks for what they are.
    """
    if "replicate" not in described.axes and not replicas_asked(options):
        return []
    if not options.world_sizes_given:
        return list(PROFILES[options.profile].meshes)
    return [
        (replicas, size // replicas)
        for size in options.world_sizes
        for replicas in range(1, size + 1)
        if size > 1 and size % replicas == 0
    ]
