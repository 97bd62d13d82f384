"""Schema of a case: everything that determines a run, as frozen data that round-trips through JSON.

Every field has a default or a bound, and every bound is checked when a case is decoded, so that a
case file from elsewhere is data and nothing else. Sizes are in elements, counts are plain integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from .mesh import INNER, Mesh, mesh_of
from .option_set import OptionValues
from .options import stored

FORMAT: Final = 2
"""Version of the case format. A file of another version is refused, not guessed at."""

MAX_WORLD_SIZE = 1024

Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Small = Annotated[int, Meta(ge=1, le=256)]
Fraction = Annotated[float, Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, Meta(gt=0.0, le=1e30)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e30)]

BlockKind = Literal[
    "mlp",
    "attention",
    "conv",
    "recurrent",
    "experts",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
]
StemKind = Literal["dense", "embedding", "conv"]
ActivationKind = Literal["gelu", "relu"]
WrapKind = Literal["whole", "block", "layer", "size"]
MomentsKind = Literal["zero", "typical", "tiny", "huge"]
ScheduleKind = Literal["constant", "warmup", "cosine"]
KernelKind = Literal["foreach", "for-loop", "fused"]
OptimizerKind = Literal[
    "adamw",
    "sgd",
    "muon",
    "adam",
    "nadam",
    "radam",
    "adamax",
    "adagrad",
    "adadelta",
    "rmsprop",
    "rprop",
    "asgd",
    "adafactor",
    "user",
]
ShapeKind = Literal["none", "whole", "rows", "columns", "number"]
CountKind = Literal["none", "int", "float", "tensor", "group"]
AdjustmentKind = Literal["original", "match_rms_adamw"]
Dtype = Literal["fp32", "bf16", "fp16"]
ParameterDtype = Literal["fp32", "bf16"]
UseKind = Literal["always", "sometimes", "never"]
RngKind = Literal["seeded", "carried"]
BackwardPrefetchKind = Literal["pre", "post", "none"]
SyncKind = Literal["last", "each", "shards"]
DamageKind = Literal["none", "flip", "truncate", "remove", "mix"]
CheckpointKind = Literal["distributed", "full", "sharded"]
CompileKind = Literal["none", "eager", "aot_eager", "inductor"]
OffloadKind = Literal["none", "pageable", "pinned"]
RESERVED = frozenset(("parameter", "master", "gradient", "step", "buffer", "padding"))
"""Roles of what a rank holds that is no optimizer state: names that no state may have."""
Pattern = Annotated[str, Meta(min_length=1, max_length=256)]
UserPath = Annotated[str, Meta(min_length=1, max_length=512)]
OptionText = Annotated[str, Meta(max_length=256)]
Options = Annotated[Mapping[OptionText, bool | int | OptionText], Meta(max_length=64)]
Patterns = Annotated[tuple[Pattern, ...], Meta(max_length=64)]


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of frozen data that rejects unknown fields.

    `frozen` and `kw_only` stand at each class again, since type checkers do not inherit them.
    """

    def __repr__(self) -> str:
        """Return Python that makes it, without the fields at their default."""
        fields = msgspec.structs.fields(self)
        values = {
            field.name: getattr(self, field.name) for field in fields if not _usual(self, field)
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in values.items())})"


def _usual(data: _Data, field: msgspec.structs.FieldInfo) -> bool:
    """Return True for a field at its default."""
    made = field.default_factory
    default = field.default if made is msgspec.NODEFAULT else made()
    return bool(getattr(data, field.name) == default)


class Block(_Data, frozen=True, kw_only=True):
    """One block of the model: maps activations of shape (batch, length, width) to the same."""

    kind: BlockKind
    hidden: Size = 8
    """mlp and experts: hidden width. Other kinds ignore it."""
    experts: Annotated[int, Meta(ge=1, le=16)] = 2
    """experts: how many there are. Every token goes to one of them, so an expert may be used on
    some ranks only."""
    heads: Small = 1
    """attention: number of heads, group_norm: number of groups. Divides the width."""
    kernel: Annotated[int, Meta(ge=1, le=15)] = 3
    """conv: kernel size over the length, odd."""
    activation: ActivationKind = "gelu"
    """mlp: between its two layers. ReLU leaves gradients of exactly 0."""
    bias: bool = True
    """rms_norm: ignored, it has none."""
    residual: bool = False
    dropout: Fraction = 0.0
    checkpoint: bool = False
    """Activation checkpointing: the forward of the block runs once more in the backward."""
    gain: bool = False
    """A 0-d parameter `gain` multiplies what the block computes."""
    empty: bool = False
    """An adapter of rank 0: parameters without elements."""
    transposed: bool = False
    """Matrices are stored transposed, so that they are not contiguous. Norms have none."""
    dtype: ParameterDtype = "fp32"
    """Of the block's parameters; activations are cast on the way in and out."""


class UserParameter(_Data, frozen=True, kw_only=True, omit_defaults=True):
    """Parameter of the user's model."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 30)], ...], Meta(max_length=16)]
    dtype: ParameterDtype = "fp32"
    trains: bool = True
    """It requires gradients, as the factory returns it."""
    contiguous: bool = True
    used: UseKind = "always"
    """Whether it had a gradient in every microbatch that was tried, in some, or in none. One that
    does not train has none anyway: `always`."""


class UserModel(_Data, frozen=True, kw_only=True, cache_hash=True):
    """User's own model: its location, and its properties at inspection.

    Plain data: only who names the factory once more has its code run. The model that a run builds
    must be the one described here.
    """

    factory: Annotated[str, Meta(min_length=3, max_length=1024)]
    """`package.module:factory` or `path/to/file.py:factory`."""
    parameters: Annotated[tuple[UserParameter, ...], Meta(min_length=1, max_length=1 << 16)]
    """In the order of `named_parameters()`."""
    order: Annotated[tuple[UserPath, ...], Meta(max_length=1 << 16)] = ()
    """Modules with parameters, by their path, in the order in which the forward calls them
    first."""
    bypassed: Annotated[tuple[UserPath, ...], Meta(max_length=1 << 16)] = ()
    """Modules, by their path, of which the forward uses a parameter while it calls something
    else."""
    features: Annotated[tuple[Pattern, ...], Meta(max_length=64)] = ()
    """Names of the features of dimension `model` that it has (case/features), but for those
    that follow from the parameters."""
    buffers: bool = False
    """Whether it has any."""


class Model(_Data, frozen=True, kw_only=True):
    """Model of a stem, blocks and a head. Activations have shape (batch, length, width).

    Or the user's own model: then every field but `user` is left at its default.
    """

    stem: StemKind = "dense"
    inputs: Size = 8
    """dense: input features; conv: input channels; embedding: vocabulary. In elements."""
    width: Size = 8
    blocks: Annotated[tuple[Block, ...], Meta(max_length=128)] = ()
    calls: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=256)] | None = None
    """Which block is called when; an index that stands twice is a module used twice."""
    outputs: Size = 4
    head_bias: bool = True
    tied: bool = False
    """The head's weight is the embedding's (stem `embedding`; then outputs == inputs)."""
    padding_idx: Annotated[int, Meta(ge=0)] | None = None
    unused: bool = False
    """One more block with parameters that no forward calls."""
    side: bool = False
    """One more input, with a layer `side` of its own, that only some microbatches of some ranks
    have: its parameters are used on some ranks only."""
    frozen: Patterns = ()
    """Patterns (fnmatch) of parameter names that do not require gradients. See
    `training.unfreeze`."""
    user: UserModel | None = None
    """The user's own model, with batches and a loss of its own, in place of all the above."""


class Data(_Data, frozen=True, kw_only=True):
    """Samples of each rank: different ones on every rank, at every step and microbatch."""

    batch: Small = 2
    """Samples in one microbatch of one rank."""
    length: Small = 3
    """Positions per sample."""
    loss_factor: Positive = 1.0
    """The loss is multiplied by it: tiny and huge gradients."""
    masked: bool = False
    """Part of the targets is left out of the loss, another number in every microbatch (stem
    `embedding`). The gradient is then the mean by token: see `Microbatch.weight`."""
    rng: RngKind = "seeded"
    """Random numbers of the forward are seeded per microbatch, or carried on by each rank."""
    past_wrapper: bool = False
    """The loss calls the module past its wrapper too: its outputs, halved, are added to those of
    the wrapper. A drawn model that is computed in fp32 and not compiled."""


class Group(_Data, frozen=True, kw_only=True):
    """Options of the parameters whose name matches `pattern` (fnmatch); the first match counts."""

    pattern: Pattern = "*"
    lr: NonNegative = 1e-3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 1e-2


class UserState(_Data, frozen=True, kw_only=True):
    """State of the user's optimizer, as it was at inspection.

    Of gradients of the size s it has the size `size` * s^`power`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """Key in the optimizer's state of a parameter."""
    size: NonNegative = 1.0
    power: Annotated[int, Meta(ge=0, le=4)] = 1
    signed: bool = True
    """True if it has elements below 0."""
    wide: bool = False
    """True if it is fp32 for a parameter in bf16 too."""
    of_matrices: ShapeKind = "whole"
    """Its shape, of a parameter with two dims or more: that of the parameter, one value for each
    row (without the last dim) or each column (without the one before), one number, or none."""
    of_vectors: ShapeKind = "whole"
    """Its shape, of other parameters."""
    keeps_dims: bool = False
    """True if it has dims of size 1 in place of those that it is without."""


class UserOptimizer(_Data, frozen=True, kw_only=True, cache_hash=True):
    """User's own optimizer class: its location, and its properties at inspection.

    Plain data, as `UserModel`. The class alone, on whole parameters, is the reference.
    """

    location: Annotated[str, Meta(min_length=3, max_length=1024)]
    """`package.module:Class` or `path/to/file.py:Class`."""
    states: Annotated[tuple[UserState, ...], Meta(max_length=32)] = ()
    count: CountKind = "none"
    """Type of `step` in its state, which counts steps, if it has one; "group": it stands in the
    parameter group, an int, and counts the steps of all parameters there."""
    elementwise: bool = True
    """A step of part of a parameter is part of the step of the whole."""
    weight_decay: bool = False
    """True if it has an option of this name."""
    maximize: bool = False
    """True if it has an option of this name."""
    bf16: bool = True
    """True if it takes parameters in bf16."""


class Optimizer(_Data, frozen=True, kw_only=True):
    """Optimizer and its parameter groups."""

    kind: OptimizerKind = "adamw"
    """sgd ignores beta1, beta2 and eps of its groups; its weight decay is added to the gradient.
    muon is for matrices; AdamW updates all else, with the same groups. adadelta has beta2 for its
    rho, rmsprop for its alpha; all others read the options that torch's have by these names."""
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=16)] = (Group(),)
    amsgrad: bool = False
    """adamw and adam alone."""
    maximize: bool = False
    momentum: Fraction = 0.0
    """sgd, muon and rmsprop; sgd has no dampening, and without a momentum no buffer."""
    nesterov: bool = False
    """sgd and muon, with a momentum."""
    adjustment: AdjustmentKind = "original"
    """muon alone: how the learning rate follows the shape, torch's `adjust_lr_fn`."""
    fallback: Patterns = ()
    """muon alone: patterns of matrices that AdamW updates, such as those of stem and head."""
    schedule: ScheduleKind = "constant"
    kernel: KernelKind = "foreach"
    """Which of torch's kernels of the optimizer the built-in implementations use."""
    user: UserOptimizer | None = None
    """The user's own class, with kind `user`. Of groups it reads lr and weight_decay; its other
    options are at their defaults."""


class Start(_Data, frozen=True, kw_only=True):
    """State before the first step."""

    step: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Optimizer steps taken already. In mid-training the moments are not zero."""
    moments: MomentsKind = "zero"
    zeros: Patterns = ()
    """Patterns of parameters that start at exactly 0, where the update is seen best."""


class Training(_Data, frozen=True, kw_only=True):
    """Options of a training step and of the run of steps."""

    first: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Index of the first step; not 0 in a segment that goes on from a checkpoint."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Index after the last step; the number of steps, if `first` is 0."""
    microbatches: Annotated[int, Meta(ge=1, le=64)] = 1
    clip: Positive | None = None
    """Maximum norm of the gradient, or None for no clipping."""
    norm: Literal["2", "inf"] = "2"
    set_to_none: bool = True
    unfreeze: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Step (0-based) before which the parameters of `model.frozen` become trainable."""
    loss_scale: Positive | None = None
    """Initial scale of the loss, a power of two: dynamic loss scaling. None is without."""
    overflow: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Step at which one microbatch of one rank has an infinite loss: the step is to be skipped.
    Needs `loss_scale`."""
    overflow_in: Pattern | None = None
    """Parameter of whose gradient one element alone overflows in that microbatch, to inf or NaN;
    the loss stays finite. None: the loss is infinite, and so all gradients. Needs `overflow`."""
    compile: CompileKind = "none"
    """The model is compiled by torch.compile with this backend. Its kernels are others than those
    of one device, so what it computes is held against bounds that are estimated."""


class Precision(_Data, frozen=True, kw_only=True):
    """Dtypes of compute and of reduction. Built-in cases draw fp32 only so far."""

    compute: Dtype = "fp32"
    reduce: Dtype = "fp32"


class Sharding(_Data, frozen=True, kw_only=True):
    """Options of sharding; an implementation ignores those that it does not have."""

    wrap: WrapKind = "block"
    """Granularity of units: the whole model, each block, each layer with parameters, or by size:
    modules with `bucket` elements or more, from the leaves up."""
    reshard: bool = True
    """Parameters are released after the forward and gathered again in the backward."""
    bucket: Size = 1 << 20
    """Elements in one bucket of gradient reduction."""
    prefetch: Annotated[int, Meta(ge=0, le=8)] = 1
    """Units gathered ahead of use."""
    backward_prefetch: BackwardPrefetchKind = "pre"
    """When the next unit is gathered in the backward: before or after the gradients of this one."""
    sync: SyncKind = "last"
    """Gradients are reduced with the last microbatch only, or with each; with "shards" over the
    shard axis with each, and over the replicate axis with the last."""
    use_orig_params: bool = True
    """FSDP1: the optimizer sees the original parameters, not the flat ones."""
    bucket_view: bool = False
    """Gradients (DDP) or parameters (ZeroRedundancyOptimizer) are views of the buckets."""
    find_unused: bool = False
    """DDP looks for unused parameters, though there may be none."""
    static_graph: bool = False
    """DDP is told that the graph is the same in every iteration."""
    optimizer_first: bool = False
    """The optimizer is made before the model is wrapped."""
    checkpoint: CheckpointKind = "distributed"
    """How torch's implementations write checkpoints: by torch.distributed.checkpoint and its
    state-dict API, whole by rank 0, or (FSDP1) sharded by FSDP1's own state-dict type."""
    device_mesh: bool = True
    """FSDP1 is given a DeviceMesh where it writes by torch.distributed.checkpoint: its state dicts
    have DTensors then, and else ShardedTensors."""
    export_offload: bool = False
    """FSDP1's full state dict of the optimizer is offloaded to the CPU, as its default is."""
    offload: OffloadKind = "none"
    """FSDP1 and FSDP2: parameters, gradients and optimizer states lie on the CPU, in pageable or
    pinned memory, and the optimizer runs there."""
    tensor_parallel: Small = 1
    """FSDP2: so many neighbouring ranks share each layer (tensor parallelism) and read the same
    samples; it divides the number of ranks, on a mesh without a replicate axis. The sums of a layer
    come in another order than on one device, so what it computes is held against bounds that are
    estimated."""
    context_parallel: Small = 1
    """Size of the mesh axis cp: its ranks read the same samples and compute parts of each
    sequence. As for tensor parallelism, bounds are estimated."""
    expert_parallel: Small = 1
    """Size of the mesh axis ep: its ranks read samples of their own, and have some experts each."""
    pipeline_parallel: Small = 1
    """Size of the mesh axis pp, the outermost: its ranks read the same samples and compute some of
    the layers. Bounds are estimated."""

    @property
    def inner(self) -> tuple[int, ...]:
        """Sizes of the mesh axes within the shard axis, in the order of INNER."""
        return tuple(getattr(self, field) for field in INNER.values())


class Disturbance(_Data, frozen=True, kw_only=True):
    """Delays that reorder ranks, in milliseconds at most, drawn again each time; 0 is none."""

    delay: Annotated[float, Meta(ge=0.0, le=10_000.0)] = 0.0
    """Before each loss, each collective and each optimizer step."""


MeshSizes = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)], ...], Meta(min_length=1, max_length=2)
]

Hosts = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)], ...], Meta(max_length=64)]


class TrainingSegment(_Data, frozen=True, kw_only=True):
    """Training segment after a checkpoint: other ranks load it and continue."""

    mesh: MeshSizes = (2,)
    steps: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Steps that are taken after the load."""
    into: Annotated[str, Meta(max_length=256)] = ""
    """The built-in implementation that loads, if another than the one that saved."""
    over: bool = False
    """The checkpoint is written over an older one, of the state before the segment's steps."""
    background: bool = False
    """One more step is taken while it is written, where the implementation can do so."""
    killed: Fraction | None = None
    """A rank is killed at this share of the time that writing takes. Then nothing but the load is
    tried: it must give the new checkpoint, or the older one, or say that there is none."""
    damage: DamageKind = "none"
    """A bit is flipped in one of the files, or one is cut short, removed, or replaced by that of an
    older checkpoint. Then nothing but the load is tried, which must refuse it."""


class Case(_Data, frozen=True, kw_only=True):
    """Everything that determines a run, except the implementation.

    `seed` determines the initial weights, the state of a start in mid-training, every sample and
    every dropout mask.
    """

    format: Literal[2] = FORMAT
    mesh: MeshSizes = (2,)
    """Sizes of the axes, of which `axes` gives the names: (W,) shards over W ranks; (R, S)
    replicates over R and shards over S. With `sharding.tensor_parallel` T, (W,) shards over W / T
    ranks, and T neighbours are on the axis tp."""
    hosts: Hosts = ()
    """Ranks on each host, in the order of ranks; the last number stands for all hosts after it, and
    () is one host for all. Each rank's environment says so, as that of torchrun does, and nothing
    else differs: a fault that only several hosts show is seen on one machine."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    start: Start = Start()
    training: Training = Training()
    precision: Precision = Precision()
    sharding: Sharding = Sharding()
    options: Options = {}
    """Options of single adapters that are not at their default, such as {"ADAPTER.OPTION": true};
    other implementations ignore them."""
    disturbance: Disturbance = Disturbance()
    resume: Annotated[tuple[TrainingSegment, ...], Meta(max_length=4)] = ()
    """Segments after a checkpoint is saved at the end of `training`; each loads the one before."""

    def __post_init__(self) -> None:
        if not isinstance(self.options, OptionValues):
            msgspec.structs.force_setattr(self, "options", stored(self.options))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    @property
    def axes(self) -> Mesh:
        """Mesh with named axes. Raises ValueError if inner axes do not divide the ranks."""
        return mesh_of(self.mesh, self.sharding.inner)
