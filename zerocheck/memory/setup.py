"""Input of a simulation: the model, the implementation, ranks and options. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from msgspec.structs import replace

from ..adapters.shared.simulation import SimulationTraits, traits_of
from ..case.codec import merged
from ..case.mesh import AxisName
from ..case.schema import (
    Block,
    Case,
    Data,
    KernelKind,
    Model,
    OffloadKind,
    Optimizer,
    OptimizerKind,
    Precision,
    Sharding,
    Training,
    WrapKind,
)
from ..catalogue import RECOMMENDED
from ..errors import UsageError, unknown
from .formulas import BytesRecipe, HeldKind, PrecisionKind, StateKind, recipe

if TYPE_CHECKING:
    from ..contract import Implementation

OPTIMIZERS: tuple[OptimizerKind, ...] = tuple(
    kind for kind in get_args(OptimizerKind) if kind != "user"
)

MOMENTUM = 0.9
"""Momentum of SGD, where none is given."""

MUON_MOMENTUM = 0.95
"""Momentum of Muon: torch's default."""

NUMBERS_READ: dict[str, float] = {"nadam": 1000.0, "radam": 1000.0}
"""Value that an optimizer reads where a state is one number, of which there is no data; others: 1.

It is a step count. RAdam divides by its second moment from the sixth step on, and NAdam by 1 less
its product of momenta. ASGD, with 1, is not averaging yet, as in its first million steps.
"""

MAX_RANKS = 1 << 16
MAX_MICROBATCHES = 64
Wrap = Literal["block", "layer", "whole"]
OFFLOADS: tuple[OffloadKind, ...] = get_args(OffloadKind)
WRAPS: tuple[Wrap, ...] = ("block", "layer", "whole")


class AxisSizes(NamedTuple):
    """Sizes of the axes that ranks are divided among, by their fields of a setup; 1 is none."""

    replicas: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1


NO_SIZES = AxisSizes()
AXES: Mapping[str, tuple[AxisName, str, str, str]] = {
    "replicas": ("replicate", "HSDP of {} replicas", "has no replicate axis (HSDP)", "one replica"),
    "tensor_parallel": ("tp", "layers sharded over {}", "shards no layers", "whole layers"),
    "expert_parallel": ("ep", "experts divided over {}", "divides no experts", "undivided experts"),
    "pipeline_parallel": ("pp", "{} pipeline stages", "has no pipeline stages", "one stage"),
}
"""Axis of the mesh, words of a choice that has it, of an implementation and a choice without it."""
COMMANDED = (
    "precision",
    "checkpoint",
    "wrap",
    "reshard",
    "microbatches",
    *AXES,
    "offload",
    "optimizer",
    "momentum",
)
"""Fields that stand in a command where they are not the default, those of FLAGS as these."""
FLAGS = {"checkpoint": "--checkpoint-activations", "reshard": "--no-reshard"}
TOGETHER = (("replicas", "offload"), ("expert_parallel", "pipeline_parallel"))
"""Axes, and offload, that are simulated together; all other pairs are not."""


def option_of(field: str) -> str:
    """Return the option of a field: `--tensor-parallel`."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulation.

    model: as the user names it; batch: samples of one microbatch of one rank; sequence: positions
    per sample; precision: mixed (compute in bf16, weights, gradients and states in fp32) or fp32;
    checkpoint: activation checkpointing of every block; wrap: granularity of units; rank: the one
    whose memory is counted, None for the first of the pipeline stage that needs the most; momentum:
    of SGD, 0 is without a buffer; reshard: units are released after the forward; microbatches:
    accumulated before each optimizer step; replicas: of HSDP, each sharded over as many ranks as it
    has; tensor_parallel: ranks that each layer is sharded over, which read the same samples (see
    tensor_parallel.py); expert_parallel: ranks that experts are divided over (experts.py);
    pipeline_parallel: stages (pipeline.py); offload: kind of host memory that has the shards with
    their gradients and states, none: that of the device has them.
    """

    model: str
    implementation: str = RECOMMENDED[3]
    world_size: int = 8
    rank: int | None = None
    batch: int = 1
    sequence: int = 1024
    precision: PrecisionKind = "mixed"
    checkpoint: bool = False
    wrap: Wrap = "block"
    optimizer: str = "adamw"
    momentum: float | None = None
    reshard: bool = True
    microbatches: int = 1
    replicas: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    offload: OffloadKind = "none"

    def check(self) -> None:
        """Raise UsageError for invalid numbers and names."""
        for field in ("world_size", "batch", "sequence", "microbatches", *AXES):
            if (value := getattr(self, field)) < 1:
                raise UsageError(f"{option_of(field)} {value}: it must be 1 or more")
        for field, most in (("microbatches", MAX_MICROBATCHES), ("world_size", MAX_RANKS)):
            if (value := getattr(self, field)) > most:
                raise UsageError(f"{option_of(field)} {value}: at most {most}")
        self._check_together()
        ranks = self.world_size
        for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if ranks % (size := getattr(self, field)):
                of = "--world-size" if ranks == self.world_size else "the ranks of a stage,"
                raise UsageError(f"{option_of(field)} {size}: it must divide {of} {ranks}")
            ranks //= size
        if self.replicas > 1 and (self.world_size % self.replicas or self.shards == 1):
            raise UsageError(
                f"--replicas {self.replicas}: it must divide --world-size {self.world_size}, and "
                "leave each replica two ranks or more"
            )
        if not 0 <= (self.rank or 0) < self.world_size:
            raise UsageError(f"--rank {self.rank}: it must be 0 to {self.world_size - 1}")
        recipe(self.precision)
        for field, allowed in (("wrap", WRAPS), ("offload", OFFLOADS), ("optimizer", OPTIMIZERS)):
            if (name := getattr(self, field)) not in allowed:
                raise unknown(field, name, allowed)
        if self.momentum is not None and self.optimizer != "sgd":
            raise UsageError(f"--momentum {self.momentum:g} is of --optimizer sgd")
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise UsageError(f"--momentum {self.momentum:g}: it must be 0 or more, and below 1")

    def _check_together(self) -> None:
        fields = dict.fromkeys(("replicas", "offload", *AXES))
        used = [field for field in fields if getattr(self, field) not in (1, "none")]
        for pair in combinations(used, 2):
            if pair not in TOGETHER:
                raise UsageError(f"{' and '.join(map(option_of, pair))}: give one of them")
        if self.expert_parallel > 1 and self.optimizer == "muon":
            raise UsageError("--expert-parallel and --optimizer muon: give one of them")
        if self.offload != "none" and self.optimizer == "muon":
            raise UsageError(
                f"--offload {self.offload}: muon gathers its matrices where its shards are, which "
                "NCCL does on a device only"
            )

    @property
    def axes(self) -> AxisSizes:
        """Sizes of its axes."""
        return AxisSizes(*(getattr(self, field) for field in AxisSizes._fields))

    @property
    def shards(self) -> int:
        """Number of ranks that one copy of what is sharded is divided among, experts aside."""
        return self.stage_ranks // (self.replicas * self.tensor_parallel)

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.world_size // self.pipeline_parallel

    @property
    def place(self) -> int:
        """Place of the counted rank's stage in the pipeline, from 0."""
        return (self.rank or 0) // self.stage_ranks

    @property
    def counted(self) -> tuple[int, ...]:
        """Ranks of which the one with the highest peak is counted.

        Of stages between the first and the last, the second has the most blocks and microbatches.
        """
        if self.rank is not None:
            return (self.rank,)
        places = sorted({0, min(1, self.pipeline_parallel - 1), self.pipeline_parallel - 1})
        return tuple(place * self.stage_ranks for place in places)

    def check_axes(self) -> None:
        """Raise UsageError for mesh axes, and an offload, that the implementation does not have.

        Imports torch.
        """
        self._check_together()
        for field, (_, _, lacks, _) in AXES.items():
            if (size := getattr(self, field)) > 1 and not has_axis(self.implementation, field):
                allowed = "" if field == "replicas" else f" (allowed: {RECOMMENDED[3]})"
                raise UsageError(
                    f"{option_of(field)} {size}: {self.implementation} {lacks}{allowed}"
                )
        if self.offload != "none" and not self.traits.offload:
            raise UsageError(
                f"--offload {self.offload}: {self.implementation} is not simulated with it "
                f"(allowed: {RECOMMENDED[3]})"
            )

    @property
    def stage(self) -> int | None:
        """Stage of the ZeRO paper that the implementation declares, or None. Imports torch."""
        return _load(self.implementation).stage

    @property
    def held_stage(self) -> int | None:
        """Stage by which it holds what it shards. Imports torch.

        With masters, gradients that are offloaded are sharded from stage 1 on.
        """
        offloads = self.offload != "none" and self.traits.masters
        return 2 if offloads and self.stage == 1 else self.stage

    @property
    def traits(self) -> SimulationTraits:
        """Traits of the implementation in a simulation. Imports torch."""
        return traits_of(_load(self.implementation))

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Fields of cases that the implementation fixes, nested. Imports torch."""
        return _load(self.implementation).fixed

    @property
    def autocast(self) -> bool:
        """True if the forward runs under torch.autocast. Imports torch."""
        return self.precision == "mixed" and self.traits.mixed is None

    @property
    def held(self) -> BytesRecipe:
        """Bytes per parameter as the implementation holds them.

        Weights and gradients in fp32 (4 + 4), and of AdamW two moments (8), of SGD its momentum
        buffer (4), if any; 4 of each state of others. In mixed precision the weights are the
        master, so with AdamW it is 16 as in the paper. With masters next to bf16 weights it is
        2 + 2 + 12, as in the paper, and next to fp32 weights 4 + 4 + 12.
        """
        return recipe(self.held_kind, self.states)

    @property
    def held_kind(self) -> HeldKind:
        """Way in which weights and gradients are held. Imports torch."""
        if not self.traits.masters:
            return "fp32"
        if self.precision == "mixed":
            # The host takes them as masters are updated.
            wide = self.traits.wide_gradients or self.offload != "none"
            return "mixed with fp32 gradients" if wide else "mixed"
        return "fp32 with masters" if self.stage else "fp32"

    @property
    def states(self) -> StateKind:
        """Optimizer in the words of the formulas."""
        if self.optimizer == "sgd" and self.options.momentum:
            return "momentum"
        return cast(StateKind, self.optimizer)

    @property
    def options(self) -> Optimizer:
        """Optimizer of the case. Which matrices Muon leaves to AdamW depends on the model.

        Where shards are on the host, it loops over the tensors, as torch does by default there.
        """
        kernel: KernelKind = "foreach" if self.offload == "none" else "for-loop"
        if self.optimizer == "muon":
            return Optimizer(kind="muon", momentum=MUON_MOMENTUM, nesterov=True, kernel=kernel)
        if self.optimizer != "sgd":
            return Optimizer(kind=cast(OptimizerKind, self.optimizer), kernel=kernel)
        momentum = MOMENTUM if self.momentum is None else self.momentum
        return Optimizer(kind="sgd", momentum=momentum, kernel=kernel)

    def case(self, blocks: int, optimizer: Optimizer | None = None) -> Case:
        """Return the case for the implementation; only its model's number of blocks is real.

        optimizer: None for `options`.
        """
        traits = self.traits
        mixed = traits.mixed if self.precision == "mixed" else None
        wrap: WrapKind = self.wrap
        # From stage 2 on each microbatch is reduced: else whole gradients would be accumulated.
        case = Case(
            mesh=(self.replicas, self.shards) if self.replicas > 1 else (self.stage_ranks,),
            model=Model(blocks=(Block(kind="mlp"),) * blocks),
            data=Data(batch=self.batch, length=self.sequence),
            optimizer=self.options if optimizer is None else optimizer,
            training=Training(microbatches=self.microbatches),
            precision=mixed or Precision(),
            sharding=Sharding(
                wrap=wrap,
                reshard=self.reshard,
                sync="each" if (self.stage or 0) >= 2 else "last",
                prefetch=traits.prefetch,
                tensor_parallel=self.tensor_parallel,
                offload=self.offload,
            ),
            options=traits.options,
        )
        fixed = self.fixed
        if fixed:
            case = _with_fixed(case, fixed, source=f"fixed of {self.implementation}")
            training = replace(case.training, microbatches=self.microbatches)  # or fewer than fixed
            case = replace(case, training=training)
        sharding = replace(case.sharding, offload=self.offload)  # with its kind of memory
        if "bucket" not in fixed.get("sharding", {}):
            sharding = replace(sharding, bucket=traits.bucket)  # beyond those of other cases
        return replace(case, sharding=sharding)

    def command(self) -> str:
        """Return the command line that simulates this."""
        words = [
            f"zerocheck memory {self.model} --implementation {self.implementation}",
            f"--world-size {self.world_size} --batch {self.batch} --sequence {self.sequence}",
        ]
        for field in COMMANDED:
            value = getattr(self, field)
            if value not in (Setup.__dataclass_fields__[field].default, None):
                word = f"{value:g}" if isinstance(value, float) else value
                words.append(FLAGS.get(field, f"{option_of(field)} {word}"))
        if self.rank or (self.rank is not None and self.pipeline_parallel > 1):
            words.append(f"--rank {self.rank}")
        return " ".join(words)


def _load(implementation: str) -> type[Implementation]:
    from ..contract.loading import load

    return load(implementation)


def has_axis(implementation: str, field: str) -> bool:
    """Return True if an implementation has the axis of a setup's field. Imports torch."""
    kind = _load(implementation)
    return AXES[field][0] in {*kind.axes, *traits_of(kind).axes}


def _with_fixed(case: Case, fixed: Mapping[str, Any], *, source: str) -> Case:
    """Put fixed fields over a case whose sizes are beyond those of other cases.

    Raises UsageError for fields that no case can have.
    """
    small = merged(Case(), fixed, source=source)
    sections: dict[str, Any] = {}
    for name, fields in fixed.items():
        if name == "options":  # as they are, since a default of ours may be another one here
            sections[name] = {**case.options, **fields}
        elif isinstance(fields, Mapping):
            section = getattr(small, name)
            values = {field: getattr(section, field) for field in fields}
            sections[name] = replace(getattr(case, name), **values)
        else:
            sections[name] = getattr(small, name)
    return replace(case, **sections)
