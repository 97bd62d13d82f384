"""AdamW or Adam in a DeepSpeed config: whether the engine makes it, and with which options."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...shared.user_config.section import Section

KINDS = ("adam", "adamw")
"""Both are AdamW to DeepSpeed, but for `adam_w_mode` false, which makes Adam of the first."""

DROPPED = ("bias_correction", "set_grad_none", "fp32_optimizer_states", "adam_w_mode")
"""Options of DeepSpeed's own kernels alone."""
OF_TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused")
PARAMS = (*OF_TORCH, *DROPPED, "torch_adam")

OUT_OF_SCOPE = (
    "zerocheck judges AdamW and Adam where the engine makes the optimizer; without `optimizer` in "
    "the config it is made outside of the engine, and --optimizer says which it is"
)


class EngineAdam(NamedTuple):
    """Options of AdamW or Adam in a config.

    config: `optimizer` for the engine; fixed: fields of `case.optimizer`; named: options of groups
    that the engine takes from the config.
    """

    config: dict[str, Any]
    fixed: dict[str, Any]
    named: tuple[str, ...]


def adam_of(top: Section) -> EngineAdam | None:
    """Read the optimizer from the config; None where it is handed to the engine.

    An option that is left out has the default of DeepSpeed's own kernels: no weight decay. If all
    are "auto", none is fixed, and groups with options of their own are drawn. If some are, those
    have their default in a case.
    """
    given = top.part("optimizer")
    given.check_names(("type", "params", "legacy_fusion"), "it takes type and params")
    if not given.says("type"):
        return None
    kind = given.values["type"]
    if not isinstance(kind, str) or kind.lower() not in KINDS:
        raise given.refuse("type", OUT_OF_SCOPE, '"Adam", "AdamW"')
    params = given.part("params")
    if "max_grad_norm" in params.values:
        raise params.refuse(
            "max_grad_norm", "DeepSpeed refuses it too", "gradient_clipping, beside `optimizer`"
        )
    params.check_names(PARAMS, "options of AdamW are " + ", ".join(PARAMS))
    coupled = kind.lower() == "adam" and not params.flag("adam_w_mode", True)
    if not params.flag("bias_correction", True):
        raise params.refuse("bias_correction", "AdamW and Adam have it", "true")
    if not params.flag("fp32_optimizer_states", True):
        raise params.refuse("fp32_optimizer_states", "moments are then in bf16", "true")
    fixed: dict[str, Any] = {
        "kind": "adam" if coupled else "adamw",
        "amsgrad": params.flag("amsgrad", False),
        "maximize": params.flag("maximize", False),
    }
    of_torch = params.flag("torch_adam", False)
    written = {name: params.values[name] for name in OF_TORCH if params.says(name)}
    options = ("lr", "betas", "eps", "weight_decay")
    if not of_torch and "weight_decay" not in params.values:
        written["weight_decay"] = 0.0
    if not all(params.auto(name) for name in options):
        of_kernel = 0.01 if not coupled and (of_torch or params.auto("weight_decay")) else 0.0
        fixed["groups"] = [_group(params, written, of_kernel)]
    mode = {"adam_w_mode": False} if coupled else {}
    config = {"type": kind, "params": {**written, **mode, "torch_adam": True}}
    named = tuple(name for name in options[1:] if name in written)
    return EngineAdam(config, fixed, named)


def _group(params: Section, written: dict[str, Any], decay: float) -> dict[str, Any]:
    """Return the one group of a case, with all parameters. decay: where none is given."""
    betas = written.get("betas", [0.9, 0.999])
    if not (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(one, int | float) and 0 <= one < 1 for one in betas)
    ):
        raise params.wrong("betas", "two numbers >= 0 and < 1")
    largest = 1e30
    return {
        "pattern": "*",
        "lr": params.number("lr", 1e-3, below=largest),
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": params.number("eps", 1e-8, below=largest),
        "weight_decay": params.number("weight_decay", decay, below=largest),
    }
