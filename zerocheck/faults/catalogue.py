"""All faults by name: what each is, where it comes from, and what it must be flagged as.

Imports no torch: the command line lists it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A known bug, planted on purpose.

    where: `module:Class`, as `zerocheck run` takes it; parent: the implementation without the
    fault; summary: what it does, in plain words; source: where it was seen; obligation: flagged
    first, or None where the ranks crash or hang; causes: what the judge names, () where diagnosis
    has no name for it; spares: obligations that must not be flagged; mild: only a report is wrong.
    A case shows it only with `features`, `world` ranks or more and `microbatches` or more.
    """

    name: str
    where: str
    parent: str
    summary: str
    source: str
    obligation: str | None
    causes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    mild: bool = False
    features: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Features that would hide it."""
    world: int = 2
    microbatches: int = 1


_STATE = ("ownership", "loss", "update", "publish", "buffers")
_FORWARD = (*_STATE, "gradient")


def _fault(
    where: str,
    parent: str,
    obligation: str | None,
    summary: str,
    source: str,
    cause: str = "",
    **needs: object,
) -> Fault:
    """The name comes from the class: `gradient:LossTimesWorld` is `loss-times-world`."""
    module, _, kind = where.partition(":")
    name = "".join(f"-{c.lower()}" if c.isupper() else c for c in kind).lstrip("-")
    return Fault(
        name=name,
        where=f"zerocheck.faults.{module}:{kind}",
        parent=parent,
        summary=summary,
        source=source,
        obligation=obligation,
        causes=(cause,) if cause else (),
        **needs,  # type: ignore[arg-type]
    )


_GRADIENT = [
    _fault(
        "gradient:AverageBecomesSum", "zero2", "gradient",
        "the average over ranks is a sum", "PT #162338", "gradient x W", world=3,
    ),
    _fault(
        "gradient:DoubleAverage", "zero1", "gradient",
        "the loss is divided by W, then gradients are averaged", "verl-SpeCo PR#29",
        "gradient / W", world=3,
    ),
    _fault(
        "gradient:LossTimesWorld", "fsdp2", "gradient",
        "the loss is multiplied by W", "HF transformers #45994", "gradient x W", world=3,
    ),
    _fault(
        "gradient:OneParameterUnreduced", "ddp", "gradient",
        "one parameter is left out of the reduction", "PT #47562; MG #599, #1446",
        "local gradient only", world=3,
    ),
    _fault(
        "gradient:FirstStepUnsynced", "zero1", "gradient",
        "the first step is not reduced", "PT #60118", "local gradient only", world=3,
    ),
    _fault(
        "gradient:SyncFirstStepOnly", "ddp", "gradient",
        "only the first step is reduced", "PT #187732", "local gradient only", world=3,
    ),
    _fault(
        "gradient:OversizedBucketSkipped", "zero1", "gradient",
        "buckets above the limit are not reduced", "DS PR#3832", "local gradient only",
        world=3, features=("bucket-small",),
    ),
    _fault(
        "gradient:SubgroupDivisor", "zero1", "gradient",
        "some parameters are divided by another group's size", "DS PR#6546, #5618; TT #1551",
        "gradient scaled", world=3,
    ),
    _fault(
        "gradient:ReducedTwice", "zero1", "gradient",
        "shards that are reduced already are reduced again", "NeMo PR#9335",
    ),
    _fault(
        "gradient:TiedReducedTwice", "zero1", "gradient",
        "a tied parameter is reduced once per alias", "DS PR#7534", "gradient doubled",
        world=3, features=("tied",),
    ),
    _fault(
        "gradient:PartitionsMisordered", "zero1", "gradient",
        "two partitions change places before the reduction", "DS PR#318",
    ),
    _fault(
        "gradient:NoneGradientShifts", "zero2", "gradient",
        "a parameter without a gradient does not move the offset", "DS PR#545",
        features=("unused",),
    ),
    _fault(
        "padding:AlignedWalkedUnaligned", "zero2", "gradient",
        "a buffer is sized with padding and walked without it", "DS PR#8158",
        "uninitialised memory",
    ),
    _fault(
        "unused:NoneBecomesZero", "ddp", "gradient",
        "no gradient becomes a zero gradient, so unused parameters move", "FS #605",
        "none became zero", features=("unused",),
    ),
    _fault(
        "unused:OutsideFlatBuffer", "zero1", "gradient",
        "a module is not in the flat buffer", "MG #565", "gradient missing",
    ),
    _fault(
        "unused:NoneEndsUnit", "zero3", "gradient",
        "a parameter without a gradient ends the collecting of its unit", "seen in review",
        features=("block-experts",),
    ),
    _fault(
        "unused:AveragedOverUsers", "zero1", "gradient",
        "a gradient is averaged over the ranks that used the parameter", "DS #5618, #6545",
        features=("sometimes-used",), world=3,
    ),
    _fault(
        "shapes:ScalarsOutside", "zero2", "gradient",
        "0-d parameters are in no bucket", "seen in review", "gradient missing",
        features=("parameter-0d",), without=("frozen",),
    ),
    _fault(
        "gradient:NotWaitedFor", "zero1", "gradient",
        "a reduction is not waited for", "OpenNMT-py #2295", features=("delays",),
    ),
    _fault(
        "freezing:RequiresGradCached", "fsdp2", "gradient",
        "which parameters train is read once", "seen often", "not unfrozen",
        # What needs no gradient runs another kernel there: the loss differs in its last bits.
        features=("unfreeze",), without=("block-conv", "block-recurrent"),
    ),
    _fault(
        "freezing:NotWrappedAgain", "ddp", "gradient",
        "what is unfrozen after DDP was made is not reduced", "Lightning #20340",
        "local gradient only", world=3, features=("unfreeze",), without=("sometimes-used",),
    ),
    _fault(
        "freezing:FrozenDecays", "zero1", "gradient",
        "what will be unfrozen has a gradient of zeros, and decays", "FS #605 (unused parameters)",
        "gradient of a frozen parameter", features=("unfreeze",),
    ),
    _fault(
        "article:ArticleStage1", "zerocheck.faults.article:Repaired", "gradient",
        "gradients are never reduced", "a tutorial on ZeRO from scratch", "local gradient only",
        world=3,
        without=("sometimes-used", "clip"),
    ),
]  # fmt: skip

_ACCUMULATION = [
    _fault(
        "accumulation:LastMicrobatchOnly", "zero2", "gradient",
        "the accumulator is reset at every microbatch",
        "open-instruct PR#1498; TT #3575; DS #7718", "last microbatch only", microbatches=3,
    ),
    _fault(
        "accumulation:ScaleAccumulatedShard", "zero2", "gradient",
        "the accumulator is divided, not what is added to it", "MG PR#3023",
        "accumulator rescaled", world=3, microbatches=2,
    ),
    _fault(
        "accumulation:MicrostepOffByOne", "zero2", "gradient",
        "the first step loses its first microbatch", "DS PR#6550, #7967", "microbatch dropped",
        microbatches=3,
    ),
    _fault(
        "accumulation:DividedTwiceByGa", "fsdp2", "gradient",
        "the loss is divided by the number of microbatches twice",
        "DS PR#7724; HF accelerate #3877", "gradient / GA", microbatches=3,
    ),
    _fault(
        "accumulation:NotDividedByGa", "zero1", "gradient",
        "the loss is not divided by the number of microbatches", "seen often",
        "gradient x GA", microbatches=3,
    ),
    _fault(
        "accumulation:MeanOfMeans", "fsdp2", "gradient",
        "microbatches count alike, whatever number of tokens they have", "torchtune PR#1875",
        "mean of means", features=("masked",),
    ),
    _fault(
        "accumulation:TokensUndeclared", "zero1", "gradient",
        "the mean over tokens, declared as the mean of means", "seen often",
        "mean over tokens", features=("masked",),
    ),
    _fault(
        "accumulation:StaleBoundary", "ddp", "gradient",
        "each microbatch acts on the boundary flag of the one before", "DS PR#1264",
        "one microbatch reduced", microbatches=3,
        without=("sometimes-used",),
    ),
    _fault(
        "accumulation:NeverZeroed", "fsdp2", "gradient",
        "gradients are not cleared between steps", "seen often",
        "gradient of the previous step kept",
    ),
]  # fmt: skip

_SCALING = [
    _fault(
        "loss_scaling:OverflowSeenLate", "zero1", "update",
        "each rank looks for an overflow before its gradient is reduced", "CA PR#1175",
        "ranks disagree", features=("overflow",),
    ),
    _fault(
        "loss_scaling:NeverSkips", "zero1", "update",
        "a step that overflows is taken", "seen often", "step not skipped",
        features=("overflow",),
    ),
    _fault(
        "loss_scaling:OverflowNotCleared", "zero1", "update",
        "after an overflow every step is skipped", "seen often", "step skipped",
        features=("overflow", "several-steps"),
    ),
    _fault(
        "loss_scaling:SkippedStepCounted", "zero1", "update",
        "a skipped step leaves a trace in the optimizer's state", "DS PR#8435",
        "skipped step changed the state", features=("overflow", "several-steps"),
    ),
    _fault(
        "loss_scaling:UnscaledTwice", "zero1", "gradient",
        "the gradient is divided by the loss scale twice", "seen often", "unscaled twice",
        features=("loss-scale",),
    ),
    _fault(
        "loss_scaling:UnscaledByNewScale", "zero1", "gradient",
        "the loss scale is updated before it is divided out", "DS PR#2695",
        "unscaled by another scale", features=("loss-scale",),
    ),
    _fault(
        "loss_scaling:ClippedBeforeUnscaling", "zero1", "clip",
        "clipping sees the gradient that is still scaled", "Lightning #9599",
        "norm before unscaling", features=("loss-scale", "clip-tight"),
    ),
]  # fmt: skip

_CLIPPING = [
    _fault(
        "clipping:ReplicatedCountedWTimes", "ddp", "clip",
        "the norm of replicated gradients is summed over ranks", "PT #88621", "norm x sqrt(W)",
        features=("clip",), without=("clip-inf",),
    ),
    _fault(
        "clipping:NormExtraReduce", "zero1", "clip",
        "the total norm is summed over ranks once more", "DS PR#551", "norm x sqrt(W)",
        features=("clip",), without=("clip-inf",),
    ),
    _fault(
        "clipping:LocalNorm", "zero1", "clip",
        "each rank clips by the norm of its own shard", "RLinf PR#1542", "local norm",
        features=("clip-tight",),
    ),
    _fault(
        "clipping:LoggedNormOnly", "zero1", "clip",
        "a partial norm is logged, clipping is right", "miles PR#35", "local norm",
        features=("clip",), spares=_FORWARD, mild=True,
    ),
    _fault(
        "clipping:ClipAmplifies", "zero1", "clip",
        "small gradients are scaled up: max for min", "DS PR#5150", "coefficient above 1",
        features=("clip-loose",),
    ),
    _fault(
        "clipping:NormWrongP", "zero1", "clip",
        "the 2-norm, whichever is asked for", "CA #4795", "another norm",
        features=("clip-inf", "clip-tight"),
    ),
    _fault(
        "clipping:Unclipped", "zero1", "clip",
        "clipping depends on a flag that is not set", "DS PR#3166", "not clipped",
        features=("clip-tight",),
    ),
    _fault(
        "clipping:Rank0Clips", "zero1", "clip",
        "only rank 0 clips", "DS #1801", "not clipped", features=("clip-tight",),
    ),
    _fault(
        "clipping:NormOfNothing", "zero1", "clip",
        "the norm is read from an attribute that is not there", "MG a82fa72d52",
        "norm of nothing", features=("clip-tight",),
    ),
    _fault(
        "clipping:StaleNorm", "zero1", "clip",
        "the norm of the first step is kept", "CA #5002", "norm of another step",
        features=("clip-tight", "several-steps"),
    ),
    _fault(
        "clipping:ClippedTwice", "zero1", "clip",
        "clipping runs twice with one coefficient", "seen often", "clipped twice",
        features=("clip-tight",),
    ),
    _fault(
        "padding:PaddingInNorm", "zero2", "clip",
        "the norm is taken over padding that nobody wrote", "DS PR#3832, #8158",
        "uninitialised memory", features=("clip",),
    ),
]  # fmt: skip

_UPDATE = [
    _fault(
        "update:L2InsteadOfDecoupled", "zero1", "update",
        "weight decay goes through the moments", "TT #4382; DS PR#5104",
        "L2 instead of decoupled",
    ),
    _fault(
        "update:DecayTwice", "zero1", "update",
        "weight decay is applied twice", "seen often", "weight decay twice",
    ),
    _fault(
        "update:DecayMissing", "zero1", "update",
        "there is no weight decay", "seen often", "weight decay missing",
    ),
    _fault(
        "update:DecayOnExcluded", "zero1", "update",
        "parameters without weight decay decay like the others", "MG #4705",
        "weight decay on excluded parameters", features=("some-decay",),
    ),
    _fault(
        "update:DecayAfterUpdate", "zero1", "update",
        "weight decay comes after the update", "seen often", "weight decay after the update",
        features=("lr-large",),
    ),
    _fault(
        "update:EpsInRoot", "zero1", "update",
        "eps is added inside of the root", "seen often", "eps inside the root",
        features=("eps-1e-3",),
    ),
    _fault(
        "update:EpsBeforeCorrection", "zero1", "update",
        "eps is added before the bias correction", "seen often",
        "eps before the bias correction", features=("eps-1e-3",),
    ),
    _fault(
        "update:BiasCorrectionOffByOne", "zero1", "update",
        "the bias corrections are those of the next step", "TT #4382", "step off by 1",
    ),
    _fault(
        "update:BetasSwapped", "zero1", "update",
        "beta1 and beta2 change places", "seen often", "betas swapped",
    ),
    _fault(
        "update:GroupsCollapse", "zero1", "update",
        "all groups learn at the rate of the first", "MG #4705", "options of another group",
        features=("groups",),
    ),
    _fault(
        "update:SchedulerLost", "zero1", "update",
        "the learning rate stays that of the first step", "TT #275",
        "learning rate of another step", features=("schedule-warmup", "several-steps"),
    ),
    _fault(
        "update:StepPerSubgroup", "zero1", "update",
        "the step count goes up once per subgroup", "DS PR#7982", "step count",
    ),
    _fault(
        "update:OutsideTheOptimizer", "ddp", "update",
        "a module is reduced, but not in the optimizer", "MG #565", "never updated",
    ),
    _fault(
        "update:FrozenDecay", "ddp", "update",
        "frozen parameters decay", "seen often", "untouched parameter changed",
        features=("frozen",),
    ),
    _fault(
        "update:UnclippedUpdate", "ddp", "update",
        "the optimizer gets the gradient before clipping", "DS PR#5170",
        "gradient before clipping", features=("clip-tight",),
    ),
]  # fmt: skip

_PUBLISHING = [
    _fault(
        "publishing:GatherStale", "zero3", "publish",
        "the forward gathers the parameters of the step before", "MG #3140; DS PR#7707",
        "parameters of the previous step",
    ),
    _fault(
        "publishing:NotPublished", "zero1", "publish",
        "the last bucket is not gathered after the update", "seen often",
        "copies of the previous step",
    ),
    _fault(
        "publishing:PublishedBeforeUpdate", "zero2", "publish",
        "parameters are gathered before the update", "MG #3140", "copies of the previous step",
    ),
    _fault(
        "publishing:PublishedRounded", "zero1", "publish",
        "parameters travel in bf16", "PT #104770", "copies rounded to bf16",
        without=("unfreeze", "overflow"),
    ),
    _fault(
        "publishing:MetaInitOverwritten", "fsdp2", "publish",
        "parameters are initialised again", "PT #90465; HF #28244, #43847", "initial state",
    ),
    _fault(
        "publishing:InitStep", "zero1", "publish",
        "a real step is taken to make the optimizer's state", "TT #4382; DS PR#5104",
        "initial state",
    ),
    _fault(
        "shapes:TransposedAsStored", "zero1", "publish",
        "a transposed parameter is flattened in the order of its memory", "bitsandbytes PR#1187",
        "initial state", features=("transposed",), without=("frozen",),
    ),
]  # fmt: skip

_OWNERSHIP = [
    _fault(
        "ownership:GroupPartitionId", "zero1", "ownership",
        "one partition id serves for all ranks", "DS PR#2059",
    ),
    _fault(
        "ownership:ShardsOverlap", "zero1", "ownership",
        "each shard is one element too long", "FS #907",
    ),
    _fault(
        "ownership:RemainderDropped", "zero1", "ownership",
        "what W does not divide is stripped as padding", "DS #1380", features=("uneven",),
    ),
    _fault(
        "ownership:PaddedShape", "zero3", "ownership",
        "padded shapes are given for the global ones", "DS PR#848, #851",
        features=("uneven",),
        without=("parameter-0d",),
    ),
    _fault(
        "ownership:RankShardsLost", "fsdp2", "ownership",
        "the last rank's shards are left out of the state", "DS PR#7585",
    ),
    _fault(
        "shapes:EmptyNotOwned", "zero3", "ownership",
        "a parameter without elements has no owner", "DS #8279", features=("parameter-empty",),
    ),
    _fault(
        "ownership:Untied", "zero1", "ownership",
        "the alias of a tied parameter is lost", "MG #656; HF accelerate PR#3154",
        features=("tied",),
    ),
]  # fmt: skip

_FORWARDS = [
    _fault(
        "forward:SeedForAll", "zero2", "loss",
        "every forward starts from one seed", "MG #6858", features=("dropout",),
    ),
    _fault(
        "forward:SeededAlike", "zero2", "loss",
        "every rank seeds its generator alike", "MG #6858", "seed for all",
        features=("carried-rng",),
    ),
    _fault(
        "forward:EvaluationMode", "ddp", "loss",
        "the model is left in evaluation mode", "seen often", "evaluation mode",
        features=("dropout",),
    ),
    _fault(
        "forward:FirstMicrobatchTwice", "zero3", "loss",
        "the first microbatch is run again in place of the second", "TT #816",
        "samples of another microbatch", microbatches=3,
    ),
    _fault(
        "forward:MicrobatchDropped", "zero1", "loss",
        "the last microbatch is not run", "DS PR#7981", "microbatch dropped", microbatches=2,
    ),
    _fault(
        "forward:SamplesOfRank0", "zero1", "loss",
        "every rank reads the samples of rank 0", "TT #816", "samples of another rank",
    ),
    _fault(
        "forward:ShardsMisordered", "zero3", "loss",
        "two shards change places when they are gathered", "DS PR#318",
    ),
    _fault(
        "forward:UnitNotGathered", "zero3", "loss",
        "a unit is read before its parameters are there", "DS PR#5606",
        "uninitialised memory",
    ),
]  # fmt: skip

_BUFFERS = [
    _fault(
        "buffers:BuffersNotBroadcast", "ddp", "buffers",
        "buffers are not sent from rank 0", "PT #178569; LlamaFactory #10820", "buffers local",
        features=("block-batch-norm", "several-steps"), world=3,
    ),
    _fault(
        "buffers:BuffersSentOnce", "ddp", "buffers",
        "buffers are not sent from rank 0 at every forward", "seen often", "buffers local",
        features=("block-batch-norm", "microbatches"), without=("static-graph",), world=3,
        microbatches=3,
    ),
    _fault(
        "buffers:BuffersAveraged", "zero1", "buffers",
        "buffers are averaged over ranks", "seen often", "buffers averaged",
        features=("block-batch-norm",), world=3,
    ),
    _fault(
        "buffers:BuffersOfRank0", "zero2", "buffers",
        "buffers of rank 0 overwrite the others'", "seen often", "buffers of rank 0",
        features=("block-batch-norm",), world=3,
    ),
    _fault(
        "buffers:BuffersRounded", "zero3", "buffers",
        "buffers are cast to half precision", "FS #427", "buffers rounded to bf16",
        features=("block-batch-norm",),
    ),
    _fault(
        "buffers:BuffersForgotten", "fsdp2", "buffers",
        "buffers are set back after every step", "seen often", "buffers not updated",
        features=("block-batch-norm",),
    ),
]  # fmt: skip

_DTYPES = [
    _fault(
        "dtypes:Bf16Unclipped", "zero1", "clip",
        "gradients in bf16 are left out of clipping", "seen often", "not clipped",
        features=("mixed-dtypes", "clip-tight"),
    ),
    _fault(
        "dtypes:NormOfOneDtype", "zero1", "clip",
        "the norm of one dtype overwrites that of the other", "seen often", "norm of one dtype",
        features=("mixed-dtypes", "clip-tight"), without=("clip-inf", "frozen"),
    ),
    _fault(
        "dtypes:StateInBf16", "zero1", "update",
        "moments of fp32 parameters are kept in bf16", "PT #104770", "rounded to bf16",
        features=("mixed-dtypes",),
    ),
    _fault(
        "dtypes:OtherBufferUnreduced", "zero1", "gradient",
        "of one gradient buffer per dtype only one is reduced", "seen often",
        "local gradient only", features=("mixed-dtypes",),
    ),
]  # fmt: skip

_BROKEN = [
    _fault(
        "unused:UnusedNotReduced", "fsdp2", None,
        "each rank reduce-scatters the gradients that it has", "PT #158719; torchtitan #2747",
        features=("side",), without=("block-experts", "frozen"), microbatches=1,
    ),
    _fault(
        "article:ArticleStage2", "zerocheck.faults.article:Repaired", None,
        "each rank all-reduces only the tensors that it owns", "a tutorial on ZeRO from scratch",
    ),
]  # fmt: skip

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *_GRADIENT, *_ACCUMULATION, *_SCALING, *_CLIPPING, *_UPDATE, *_PUBLISHING, *_OWNERSHIP,
        *_FORWARDS, *_BUFFERS, *_DTYPES, *_BROKEN,
    )
}  # fmt: skip
"""Name -> fault."""
