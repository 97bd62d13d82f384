"""Input of a simulation: the model, the implementation, ranks and options. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from msgspec.structs import replace

from ..adapters.shared.simulation import SimulationTraits, traits_of
from ..case.codec import merged
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One simulation.

    model: as the user names it; batch: samples of one microbatch of one rank; sequence: positions
    per sample; precision: mixed (compute in bf16, weights, gradients and states in fp32) or fp32;
    checkpoint: activation checkpointing of every block; wrap: granularity of units; rank: the one
    whose memory is counted; momentum: of SGD, 0 is without a buffer; reshard: units are released
    after the forward; microbatches: accumulated before each optimizer step; replicas: of HSDP, each
    sharded over as many ranks as it has; tensor_parallel: ranks that each layer is sharded over,
    which read the same samples (see tensor_parallel.py); offload: kind of host memory that has the
    shards with their gradients and states, none: that of the device has them.
    """

    model: str
    implementation: str = RECOMMENDED[3]
    world_size: int = 8
    rank: int = 0
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
    offload: OffloadKind = "none"

    def check(self) -> None:
        """Raise UsageError for invalid numbers and names."""
        for option, value in (
            ("--world-size", self.world_size),
            ("--batch", self.batch),
            ("--sequence", self.sequence),
            ("--microbatches", self.microbatches),
            ("--replicas", self.replicas),
            ("--tensor-parallel", self.tensor_parallel),
        ):
            if value < 1:
                raise UsageError(f"{option} {value}: it must be 1 or more")
        if self.microbatches > MAX_MICROBATCHES:
            raise UsageError(f"--microbatches {self.microbatches}: at most {MAX_MICROBATCHES}")
        if self.world_size > MAX_RANKS:
            raise UsageError(f"--world-size {self.world_size}: at most {MAX_RANKS}")
        if self.replicas > 1 and self.tensor_parallel > 1:
            raise UsageError("--replicas and --tensor-parallel: give one of them")
        if self.world_size % self.tensor_parallel:
            raise UsageError(
                f"--tensor-parallel {self.tensor_parallel}: it must divide --world-size "
                f"{self.world_size}"
            )
        if self.replicas > 1 and (self.world_size % self.replicas or self.shards == 1):
            raise UsageError(
                f"--replicas {self.replicas}: it must divide --world-size {self.world_size}, and "
                "leave each replica two ranks or more"
            )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"--rank {self.rank}: it must be 0 to {self.world_size - 1}")
        if self.wrap not in WRAPS:
            raise unknown("wrap", self.wrap, WRAPS)
        if self.offload not in OFFLOADS:
            raise unknown("offload", self.offload, OFFLOADS)
        self._check_offload()
        recipe(self.precision)
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.momentum is not None and self.optimizer != "sgd":
            raise UsageError(f"--momentum {self.momentum:g} is of --optimizer sgd")
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise UsageError(f"--momentum {self.momentum:g}: it must be 0 or more, and below 1")

    def _check_offload(self) -> None:
        if self.offload != "none" and self.tensor_parallel > 1:
            raise UsageError("--offload and --tensor-parallel: give one of them")
        if self.offload != "none" and self.optimizer == "muon":
            raise UsageError(
                f"--offload {self.offload}: muon gathers its matrices where its shards are, which "
                "NCCL does on a device only"
            )

    @property
    def shards(self) -> int:
        """Number of ranks that one copy of what is sharded is divided among."""
        return self.world_size // (self.replicas * self.tensor_parallel)

    def check_axes(self) -> None:
        """Raise UsageError for mesh axes, and an offload, that the implementation does not have.

        Imports torch.
        """
        from ..contract.loading import load

        self._check_offload()
        if self.replicas > 1 and "replicate" not in load(self.implementation).axes:
            raise UsageError(
                f"--replicas {self.replicas}: {self.implementation} has no replicate axis (HSDP)"
            )
        if self.tensor_parallel > 1 and "tp" not in load(self.implementation).axes:
            raise UsageError(
                f"--tensor-parallel {self.tensor_parallel}: {self.implementation} shards no layers "
                f"(allowed: {RECOMMENDED[3]})"
            )

        if self.offload != "none" and not self.traits.offload:
            raise UsageError(
                f"--offload {self.offload}: {self.implementation} is not simulated with it "
                f"(allowed: {RECOMMENDED[3]})"
            )

    @property
    def stage(self) -> int | None:
        """Stage of the ZeRO paper that the implementation declares, or None. Imports torch."""
        from ..contract.loading import load

        return load(self.implementation).stage

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
        from ..contract.loading import load

        return traits_of(load(self.implementation))

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Fields of cases that the implementation fixes, nested. Imports torch."""
        from ..contract.loading import load

        return load(self.implementation).fixed

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
            mesh=(self.replicas, self.shards) if self.replicas > 1 else (self.world_size,),
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
        if self.precision != "mixed":
            words.append(f"--precision {self.precision}")
        if self.checkpoint:
            words.append("--checkpoint-activations")
        if self.wrap != "block":
            words.append(f"--wrap {self.wrap}")
        if not self.reshard:
            words.append("--no-reshard")
        if self.microbatches > 1:
            words.append(f"--microbatches {self.microbatches}")
        if self.replicas > 1:
            words.append(f"--replicas {self.replicas}")
        if self.tensor_parallel > 1:
            words.append(f"--tensor-parallel {self.tensor_parallel}")
        if self.offload != "none":
            words.append(f"--offload {self.offload}")
        if self.optimizer != "adamw":
            words.append(f"--optimizer {self.optimizer}")
        if self.momentum is not None:
            words.append(f"--momentum {self.momentum:g}")
        if self.rank:
            words.append(f"--rank {self.rank}")
        return " ".join(words)


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
