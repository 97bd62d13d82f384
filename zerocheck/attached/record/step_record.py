"""Record of one checked step on one rank: small structured data, and the tensors that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...case.schema import Group, Optimizer, OptimizerKind
from ...optimizers import OPTIMIZERS
from ...protocol.observations import Entry
from ...protocol.verdicts import Violation
from .casts import Casts
from .digests import PartDigest
from .dtypes import dtype_of
from .forwards import Forward
from .model_hooks import ScriptHook
from .repeatable import Digest

BEFORE, AFTER = "before", "after"

FROZEN, NO_OPTIMIZER, ELSEWHERE = -1, -2, -3
"""In the place of a parameter group: it does not train; no optimizer has it; that of another
`attach` has it."""

Key = tuple[str, int]
"""(what, number of the piece). what: "before.parameter", or "after." and the role of a state;
"gradient", as the optimizer was given it; "reduced" and "clipped", the gradient around clipping;
"reclipped", after the last clipping where there were several; "accumulated", the gradient as the
last backward left it, where the script changed it after that."""

Point = Literal["accumulated", "given"]
ACCUMULATED: Final = "accumulated"
GIVEN: Final = "given"
"""Points at which a gradient is read: where its reduction ends, and where the optimizer is given
it, before it is clipped."""


class ShardPiece(msgspec.Struct, frozen=True, array_like=True):
    """Shard of a parameter that this rank holds.

    local: shape of the local tensor, in elements; dtype: of the parameter; group: number of its
    parameter group, through all optimizers, or FROZEN, NO_OPTIMIZER or ELSEWHERE; left_out: True if
    the wrapper does not keep it equal on all ranks; whole: by the reference, it is no part.
    """

    entry: Entry
    local: tuple[int, ...]
    dtype: str
    group: int
    left_out: bool = False
    whole: bool = False

    @property
    def name(self) -> str:
        """Name of the parameter in the unwrapped model."""
        return self.entry.name

    @property
    def place(self) -> tuple[object, ...]:
        """Key of the shard's elements, equal on all ranks that hold them."""
        return self.entry.name, self.entry.start, self.entry.stop, self.entry.box

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return dtype_of(self.dtype)


class GroupOptions(msgspec.Struct, frozen=True):
    """A parameter group, as it was when the optimizer took its step.

    kind: of the optimizer; rates: learning rates that it has at other times.
    """

    lr: float
    weight_decay: float
    kind: OptimizerKind = "adamw"
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    momentum: float = 0.0
    nesterov: bool = False
    rates: tuple[float, ...] = ()

    @property
    def group(self) -> Group:
        """Options of the group, as a case has them."""
        names = OPTIMIZERS[self.kind].fields.group
        return msgspec.structs.replace(Group(), **{name: getattr(self, name) for name in names})

    @property
    def optimizer(self) -> Optimizer:
        """Options of the whole optimizer, as a case has them; without groups."""
        names = OPTIMIZERS[self.kind].fields.optimizer
        given = {name: getattr(self, name) for name in names}
        return msgspec.structs.replace(Optimizer(kind=self.kind), **given)


class Clip(msgspec.Struct, frozen=True):
    """Clipping of the gradient by its norm, or of each element by its value.

    max_norm: the limit; norm: as reported; kind: "2" or "inf", or another p; "value"; "again" for
    what was clipped before; pieces: the numbers of those that it clipped; others: the norm is also
    that of parameters which the model has not.
    """

    max_norm: float
    kind: str
    norm: float
    pieces: tuple[int, ...]
    others: bool = False


class MasterParts(msgspec.Struct, frozen=True, array_like=True):
    """Digests of what an engine with masters has on this rank.

    masters: of its masters, cast to the dtype of the parameters; copies: of the parameters that the
    forward uses, in an order that does not change.
    """

    masters: tuple[PartDigest, ...] = ()
    copies: tuple[PartDigest, ...] = ()


class OptimizerStep(msgspec.Struct, frozen=True, array_like=True):
    """Record of one optimizer in a step.

    groups: number of its parameter groups; ran: steps that it took; skipped: the GradScaler, or a
    fused optimizer by its order, left its update out; finite: whether its gradient was, where a
    GradScaler looked.
    """

    name: str
    groups: int = 1
    ran: int = 1
    skipped: bool = False
    finite: bool | None = None

    @property
    def took(self) -> bool:
        """True if it updated its parameters."""
        return self.ran > 0 and not self.skipped

    @property
    def reached(self) -> bool:
        """True if its gradient was observed, where it updates or leaves the update out."""
        return self.ran > 0 or self.skipped


class OuterChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of parameters by an optimizer around another one, after the step of that one.

    outer, inner: names of the classes; tensors: names of the parameters.
    """

    outer: str
    inner: str
    tensors: tuple[str, ...]


class NotFinite(msgspec.Struct, frozen=True, array_like=True):
    """First value of a phase of a step, on one rank, that is not finite.

    phase: see not_finite.py; microbatch: -1 where it is of none; number: order within it; place:
    in words, without the element; element: its index; value: "nan", "inf" or "-inf".
    """

    phase: int
    microbatch: int
    number: int
    place: str
    element: tuple[int, ...]
    value: str


class MovedBuffer(msgspec.Struct, frozen=True, array_like=True):
    """Buffer that the script moved outside of the forward; digests before and after the step."""

    name: str
    before: Digest
    after: Digest


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Observed step without its tensors.

    number: of the step, the first after `attach` is 1; steps: of each optimizer within it; before,
    after: the optimizer's step count per piece, None where it has no state; forwards: calls of the
    model that a backward came back to; unjudged: why the gradient is not judged, if there is a
    reason in the step; not_finite: first values that are not, by phase; masters: before the step
    and after it, of an engine that has them; casts: of FSDP's mixed precision; hooks: of the
    script, those that changed something; late: parameters that were changed after the optimizer's
    step; outer: those that an optimizer around it changed; kept: those of which the gradient of the
    step before was not cleared; samples_on: the rank that has the calls of whole samples, where
    this one has parts of their sequence, else -1; reduces: True if the script's own collectives
    reduce the gradients after the backward; aside: those that are frozen, or that no
    optimizer has, and that the script changed before or after the optimizer's step; outside: number
    of tensors that the optimizers have and the model has not.
    """

    rank: int
    world_size: int
    number: int
    what: str
    pieces: tuple[ShardPiece, ...]
    options: tuple[GroupOptions, ...]
    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    steps: tuple[OptimizerStep, ...] = (OptimizerStep(""),)
    scaling: bool = False
    loss_scale: float = 1.0
    forwards: int = 0
    unjudged: str = ""
    not_finite: tuple[NotFinite, ...] = ()
    clips: tuple[Clip, ...] = ()
    masters: tuple[MasterParts, ...] = ()
    casts: Casts | None = None
    hooks: tuple[ScriptHook, ...] = ()
    late: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    outside: int = 0
    samples_on: int = -1
    reduces: bool = False
    outer: tuple[OuterChange, ...] = ()
    moved: tuple[MovedBuffer, ...] = ()
    axes: dict[str, int] = {}
    """Sizes of the axes of the mesh that split something else than samples, by their names."""
    stage: int = 0
    """Number of the pipeline's stage that this rank is in, of `stages`."""
    stages: int = 1
    divided: int = 1
    """Divisor that the schedule of a pipeline applies to gradients: microbatches, or 1."""
    alike: int = 1
    """Number of ranks that compute with the same samples, as declared."""
    lines: dict[str, tuple[int, ...]] = {}
    """Ranks along each dimension of the meshes of the job, by its name."""

    @property
    def reducing(self) -> int:
        """Number of ranks that a gradient is reduced over: those of a stage."""
        return self.world_size // self.stages

    @property
    def placed(self) -> bool:
        """True if the meshes say which ranks hold the same of every parameter."""
        return bool(self.lines) and self.alike == 1

    @property
    def scale(self) -> float:
        """Divisor of the local gradients, beside the number of ranks."""
        return self.loss_scale * self.divided

    @property
    def took(self) -> bool:
        """True if an optimizer updated its parameters."""
        return any(one.took for one in self.steps)

    @property
    def ran(self) -> bool:
        """True if an optimizer's `step` was called."""
        return any(one.ran > 0 for one in self.steps)

    @property
    def reached(self) -> bool:
        """True if the gradient of an optimizer was observed."""
        return any(one.reached for one in self.steps)

    @property
    def skipped(self) -> bool:
        """True if the update was left out."""
        return not self.took and any(one.skipped for one in self.steps)

    def optimizer_of(self, piece: ShardPiece) -> OptimizerStep | None:
        """Return what the optimizer of a piece did; None if it has none here."""
        group = piece.group
        for one in self.steps if group >= 0 else ():
            if group < one.groups:
                return one
            group -= one.groups
        return None


@dataclass(frozen=True)
class Observed:
    """Checked step on one rank.

    values: flat tensors on the CPU, in row-major order; forwards: the calls of the model, for the
    reference; buffers: before them, by name; device: of the run; norms: by the number of their
    clipping, those that are not reduced over the ranks yet; model: that of the run, None in a
    bundle; reordered: makes the calls of whole samples whose parts are put together in another
    order, None where there are no parts; between: what is wrong between two stages; seeded_apart:
    ranks of tensor parallelism draw other random numbers in a model with dropout.
    """

    summary: StepSummary
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    device: str = "cpu"
    norms: dict[int, DTensor] = field(default_factory=dict)
    model: nn.Module | None = None
    reordered: Callable[[], list[Forward]] | None = None
    between: Violation | None = None
    seeded_apart: bool = False

    def gradient(self, number: int, point: Point = GIVEN) -> torch.Tensor | None:
        """Return the gradient of a piece at a point, or None if it has none there."""
        if point == ACCUMULATED and (value := self.values.get((ACCUMULATED, number))) is not None:
            return value
        if point == GIVEN and ("gradient", number) not in self.values and self._took(number):
            return None  # it was clipped, and set to None before the step
        return self.before_clipping(number)

    def before_clipping(self, number: int) -> torch.Tensor | None:
        """Return the gradient of a piece where it was clipped, else as the optimizer got it."""
        value = self.values.get(("reduced", number))
        return self.values.get(("gradient", number)) if value is None else value

    def _took(self, number: int) -> bool:
        step = self.summary.optimizer_of(self.summary.pieces[number])
        return step is not None and step.took


class GradientChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of the gradients of a rank by the script, between their reduction and the step.

    factor: of all of them, None where there is none; bound: relative, of a factor; count: gradients
    that are not 0; scaled: names of those with a factor that is not 1; edited: of those whose
    elements changed otherwise; removed: of those that the optimizer was not given.
    """

    factor: float | None
    bound: float
    count: int
    scaled: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class RankVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a rank to the others, sent after it judged its own shards.

    hashes: per piece, by hashed role, as in Key; squares, peaks: per piece, the sum of squares and
    the largest magnitude of its gradient before clipping, -1 where there is none; shares,
    violations: of its own judgement; samples: hash of those of its recorded calls, or ""; change:
    of its gradients by the script, if there is one.
    """

    summary: StepSummary
    hashes: tuple[dict[str, str], ...]
    squares: tuple[float, ...]
    peaks: tuple[float, ...]
    shares: dict[str, float] = {}
    violations: tuple[Violation, ...] = ()
    samples: str = ""
    change: GradientChange | None = None


Fetch = Callable[[int, str, int], torch.Tensor | None]
"""fetch(rank, what, number of its piece): the tensor, or None if it has none."""


def element_of(piece: ShardPiece, position: int) -> tuple[int, ...]:
    """Index in the whole tensor of an element of the local one, by its row-major position."""
    box = piece.entry.box
    if box is None:
        return index_of(piece.entry.start + position, piece.entry.shape)
    inner = index_of(position, tuple(high - low for low, high in box))
    return tuple(low + at for (low, _), at in zip(box, inner, strict=True))


def index_of(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element of a tensor, by its row-major position."""
    index: list[int] = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))
