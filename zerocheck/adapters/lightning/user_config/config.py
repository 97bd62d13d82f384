"""Whole file, sorted: the fields that it fixes in cases, and the Trainer's strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ....errors import UsageError, did_you_mean
from ...deepspeed.user_config.config import MOST_MICROBATCHES, DeepSpeedConfig, config_of
from ...shared.user_config.reader import Reader
from ...shared.user_config.section import Section
from ...shared.user_config.treatment import left_out_notes, treat_keys
from .deepspeed import deepspeed_of
from .keys import IGNORED, TOP, TRAINER
from .strategy import Policy, Strategy, strategy_of

Precision = Literal["32-true", "bf16-mixed"]

PRECISIONS: dict[str, Precision] = {
    "32-true": "32-true",
    "32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
}
"""Spellings of `precision` that are checked, and what Lightning makes of each."""

REFUSED = {
    **dict.fromkeys(("16-mixed", "16", "16-true"), "the CPU has no fp16"),
    "bf16-true": "it makes parameters and optimizer states of your model bf16",
    **dict.fromkeys(("64-true", "64"), "it makes parameters of your model fp64"),
    **dict.fromkeys(
        ("transformer-engine", "transformer-engine-float16"),
        "what is quantized is far outside of the bounds of a step",
    ),
}
"""Values of `precision` that are not checked, and why."""

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
ON_GPUS = {
    "fsdp": "it requires a GPU accelerator",
    "deepspeed": "it is only supported on CUDA GPUs",
}
"""Strategies that Lightning refuses on the CPU, in its words."""

MARKS = ("trainer", "seed_everything")
"""Keys by which a config is known."""

SUBCOMMAND = "fit"


@dataclass(frozen=True, kw_only=True)
class LightningConfig:
    """A config, sorted.

    name: as it was given; fixed: fields of cases, nested; strategy: what the Trainer is given;
    precision: that of the Trainer; deepspeed: the config that Lightning hands to DeepSpeed, or
    None; notes: sentences for who runs it.
    """

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy
    precision: Precision = "32-true"
    deepspeed: DeepSpeedConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Built-in implementation of the same code, whose known issues apply."""
        if self.deepspeed is not None:
            return self.deepspeed.code
        if self.strategy.fsdp is None:
            return "ddp"
        names = {"SHARD_GRAD_OP": "fsdp1-grad-op", "NO_SHARD": "fsdp1-no-shard"}
        return names.get(self.strategy.fsdp.sharding, "fsdp1")


def recognises(values: Mapping[str, Any]) -> bool:
    """Return True for a config of LightningCLI, by its keys."""
    inside = values.get(SUBCOMMAND)
    several = [values, inside] if isinstance(inside, dict) else [values]
    return any(mark in one for one in several for mark in MARKS)


def _sorted(top: Section) -> LightningConfig:
    if SUBCOMMAND in top.values:
        top = top.part(SUBCOMMAND)
    others = list(top.ignored_names((*TOP, SUBCOMMAND), IGNORED))
    known = {key: one for key, one in top.values.items() if key not in others}
    outside = treat_keys(top._replace(values=known), TOP, IGNORED)
    trainer = top.part("trainer")
    treated = treat_keys(trainer, TRAINER, IGNORED)
    strategy = strategy_of(trainer)
    _check_accelerator(trainer, strategy)
    precision = _precision(trainer)
    clip = _clip(trainer, strategy)
    count = trainer.whole("accumulate_grad_batches", 1, lowest=1)
    notes = _notes(top, strategy, precision, others)
    if trainer.says("gradient_clip_algorithm") and clip is None:
        notes.append(
            f"{top.source}: Lightning does not read gradient_clip_algorithm without "
            "gradient_clip_val"
        )
    notes += left_out_notes(
        top.source, {**outside.left_out, **treated.left_out, **strategy.left_out}
    )
    if strategy.deepspeed is not None:
        return _of_deepspeed(trainer, strategy, precision, clip, count, notes)
    if count > MOST_MICROBATCHES:
        notes.append(f"{top.source}: drawn: accumulate_grad_batches: steps would take long")
    training: dict[str, Any] = {"norm": "2", "clip": clip}
    if count <= MOST_MICROBATCHES:
        training["microbatches"] = count
    return LightningConfig(
        name=top.source,
        fixed={"training": training, **_fixed(strategy, precision)},
        strategy=strategy,
        precision=precision,
        notes=tuple(notes),
    )


def _fixed(strategy: Strategy, precision: Precision) -> dict[str, Any]:
    """Return the fields of cases that the strategy and the precision fix."""
    fsdp = strategy.fsdp
    fixed: dict[str, Any] = {}
    if precision == "bf16-mixed":
        fixed["precision"] = {"compute": "bf16", "reduce": "fp32" if fsdp is None else "bf16"}
    if fsdp is not None:
        fixed["sharding"] = {
            "wrap": fsdp.units.kind,
            "use_orig_params": not fsdp.flat,
            "offload": "none",
        }
    elif strategy.passed.get("static_graph"):
        fixed["sharding"] = {"static_graph": True}
    return fixed


def _check_accelerator(trainer: Section, strategy: Strategy) -> None:
    word = trainer.values.get("accelerator")
    if word is None:
        return
    if str(word).lower() not in ACCELERATORS:
        if str(word).lower() in ("tpu", "mps", "hpu"):
            raise trainer.refuse("accelerator", "it is out of scope", ", ".join(ACCELERATORS))
        raise trainer.wrong(
            "accelerator", ", ".join(ACCELERATORS), did_you_mean(str(word), ACCELERATORS)
        )
    if strategy.kind in ON_GPUS and str(word).lower() == "cpu":
        raise UsageError(
            f'{trainer.source}: {trainer.prefix}accelerator is "cpu", where Lightning refuses the '
            f'strategy {strategy.kind}: {ON_GPUS[strategy.kind]} (allowed: "gpu", "cuda", "auto")'
        )


def _precision(trainer: Section) -> Precision:
    word = str(trainer.values.get("precision") or "32-true")
    if word in REFUSED:
        allowed = ", ".join(f'"{one}"' for one in ("32-true", "bf16-mixed"))
        raise trainer.refuse("precision", REFUSED[word], allowed)
    if word not in PRECISIONS:
        raise trainer.wrong("precision", ", ".join(PRECISIONS), did_you_mean(word, PRECISIONS))
    return PRECISIONS[word]


def _clip(trainer: Section, strategy: Strategy) -> float | None:
    """Return the norm to which gradients are clipped. UsageError for what is refused."""
    algorithm = trainer.word("gradient_clip_algorithm", "norm", ("norm", "value"))
    clip = trainer.number("gradient_clip_val", 0.0, below=1e30) or None
    if clip is None:
        return None
    if algorithm == "value":
        raise trainer.refuse(
            "gradient_clip_algorithm", "it judges the norm of gradients alone", '"norm"'
        )
    if strategy.kind == "fsdp":
        raise UsageError(
            f"{trainer.source}: {trainer.prefix}gradient_clip_val: Lightning says at the first "
            "step that `gradient_clip_algorithm='norm'` is currently not supported for "
            "`FSDPPrecision` (allowed: left out, or clip_grad_norm_ of the FSDP module in "
            "configure_gradient_clipping of your module)"
        )
    return clip


def _notes(top: Section, strategy: Strategy, precision: Precision, others: list[str]) -> list[str]:
    source = top.source
    fsdp = strategy.fsdp
    made = "DDP" if fsdp is None else f"FSDP1 ({fsdp.sharding})"
    notes = [f"{source} runs as {made} of Lightning"] if strategy.deepspeed is None else []
    if others:
        notes.append(f"{source}: left out: {', '.join(others)}: no keys of LightningCLI itself")
    if top.values.get("seed_everything", True) is not False:
        notes.append(
            f"{source}: LightningCLI seeds all ranks alike, so that ranks draw the same dropout "
            "masks; cases seed each rank by itself"
        )
    if fsdp is not None:
        if precision == "bf16-mixed":
            notes.append(
                f"{source}: in bf16-mixed Lightning has FSDP reduce gradients in bf16 too, the "
                "forward is under autocast as well, and floating targets within a batch are cast; "
                "those of cases are not"
            )
        notes += _of_policy(source, fsdp.units)
    return notes


def _of_policy(source: str, units: Policy) -> list[str]:
    words = {
        "block": "units are the blocks in drawn models, and the classes that are named in a model "
        "of your own (--model)",
        "size": "the size of units is drawn; a model of your own has the default of torch",
        "whole": "without auto_wrap_policy the whole model is one unit",
    }
    return [f"{source}: {words[units.kind]}"]


def _of_deepspeed(
    trainer: Section,
    strategy: Strategy,
    precision: Precision,
    clip: float | None,
    count: int,
    notes: list[str],
) -> LightningConfig:
    assert strategy.deepspeed is not None
    if count > 1:
        raise trainer.refuse(
            "accumulate_grad_batches",
            "with DeepSpeed Lightning divides the loss by it, and the engine does so again, while "
            "zerocheck runs the engine alone: see "
            "reports/findings/lightning-deepspeed-divides-twice.md",
            "1",
        )
    values = deepspeed_of(strategy.deepspeed, clip=clip, bf16=precision == "bf16-mixed")
    made = config_of(Section("DeepSpeed", trainer.source, "", values))
    return LightningConfig(
        name=trainer.source,
        fixed=made.fixed,
        strategy=strategy,
        precision=precision,
        deepspeed=made,
        notes=(*made.notes, *notes),
    )


_reader = Reader("Lightning", _sorted)
read, code_of = _reader.read, _reader.code_of
