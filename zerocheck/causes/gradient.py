"""Causes of a wrong reduced gradient: factors, microbatches, missing terms."""

from __future__ import annotations

from .registry import cause, family

GRADIENT_TIMES_W = cause(
    "gradient x W",
    of=("gradient", "update"),
    says="the optimizer was given the gradient times the number of ranks",
    shows="The gradient is W times too large on W ranks.",
    usual="It is summed over ranks and never divided by their number.",
    attributed=r"every .* counts \S+ times \((.* = )?[WS] = |the gradient times W in",
)
GRADIENT_OVER_W = cause(
    "gradient / W",
    of=("gradient", "update"),
    says="the optimizer was given the gradient divided by the number of ranks",
    shows="The gradient is W times too small on W ranks.",
    usual="It is divided by the number of ranks twice, in the loss and in the reduction.",
    attributed=r"every .* counts \S+ times \((.* = )?1/[WS] = |the gradient over W in",
)
GRADIENT_TIMES_ROOT_W = cause(
    "gradient x sqrt(W)",
    of=("gradient",),
    shows="The gradient is sqrt(W) times too large.",
    usual="A division by sqrt(W) before and after the sum is left out once.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?sqrt\([WS]\) = ",
)
GRADIENT_OVER_ROOT_W = cause(
    "gradient / sqrt(W)",
    of=("gradient",),
    shows="The gradient is sqrt(W) times too small.",
    usual="A division by sqrt(W) before and after the sum is made once too often.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?1/sqrt\([WS]\) = ",
)
GRADIENT_TIMES_GA = cause(
    "gradient x GA",
    of=("gradient",),
    shows="The gradient is as many times too large as there are microbatches.",
    usual="Losses are not divided by the number of microbatches.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?GA = ",
)
GRADIENT_OVER_GA = cause(
    "gradient / GA",
    of=("gradient",),
    shows="The gradient is as many times too small as there are microbatches.",
    usual="The trainer and the library both divide by the number of microbatches.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?1/GA = ",
)
GRADIENT_TIMES_W_TIMES_GA = cause(
    "gradient x W x GA",
    of=("gradient",),
    shows="The gradient is too large by ranks times microbatches.",
    usual="Neither the mean over ranks nor that over microbatches is taken.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?(W GA|GA W) = ",
)
GRADIENT_DOUBLED = cause(
    "gradient doubled",
    of=("gradient",),
    shows="The gradient is twice too large.",
    usual="A hook or a backward runs twice and adds to the same buffer.",
    attributed=r"counts 2 times",
)
GRADIENT_ZERO = cause(
    "gradient zero",
    of=("gradient", "clip"),
    shows="The gradient is 0.",
    usual="It is cleared before the optimizer reads it, or the reduction writes elsewhere.",
    attributed=r"it is 0: no local gradient",
)
GRADIENT_SCALED = cause(
    "gradient scaled",
    of=("gradient",),
    tier=3,
    shows="All wrong tensors are one common factor away from the right gradient, which has no "
    "name.",
    usual="A loss is weighted, or a division uses another count than that of ranks and "
    "microbatches.",
    attributed=r"every (local gradient|loss) counts (?!0 )\S+ times|infinite",
)
NOT_UNSCALED = cause(
    "not unscaled",
    of=("gradient",),
    shows="The gradient is larger by the loss scale.",
    usual="The loss scale is never divided out.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?loss scale = ",
)
UNSCALED_TWICE = cause(
    "unscaled twice",
    of=("gradient",),
    shows="The gradient is smaller by the loss scale.",
    usual="The loss scale is divided out by the scaler and again by the trainer.",
    attributed=r"every (local gradient|loss) counts \S+ times \((.* = )?1/loss scale = ",
)
UNSCALED_BY_ANOTHER_SCALE = cause(
    "unscaled by another scale",
    of=("gradient",),
    shows="The gradient is twice too large or too small under a loss scale.",
    usual="The scale was updated between the backward and the division by it.",
    attributed=r"counts (2|0\.5) times",
)
MEAN_IN_THE_LOSSES = cause(
    "mean in the losses",
    of=("gradient",),
    tier=2,
    shows="The mean over ranks is right but for round-off of a division in the losses.",
    usual="Losses are divided by the number of ranks and gradients are summed, which is "
    "declared by divide_ranks='loss'.",
    attributed=r"was divided by W = \d+ in its loss",
)
MEAN_OF_MEANS = cause(
    "mean of means",
    of=("gradient",),
    tier=2,
    shows="Microbatches with few tokens weigh as much as those with many.",
    usual="Each loss is a mean over its own tokens, and the means are averaged.",
    attributed=r"every microbatch counts alike",
)
MEAN_OVER_TOKENS = cause(
    "mean over tokens",
    of=("gradient",),
    tier=2,
    shows="Microbatches are weighted by their numbers of tokens, though equal weights are "
    "declared.",
    usual="The trainer divides by all tokens, and the semantics still say weight='microbatch'.",
    attributed=r"counts by its number of tokens",
)
LOCAL_GRADIENT_ONLY = cause(
    "local gradient only",
    of=("gradient", "update"),
    says="the optimizer was given the local gradient of one rank",
    shows="Each rank holds its own local gradient.",
    usual="The gradient is never reduced over ranks.",
    attributed=r"own gradient( alone, counted|;|$)|not reduced over|one rank's gradient in",
)
LOCAL_GRADIENT_OVER_W = cause(
    "local gradient / W",
    of=("gradient",),
    shows="Each rank holds its own local gradient divided by W.",
    usual="The division is there and the reduction is missing, or its result is not waited for.",
    attributed=r"own (gradient alone, )?counted once|own, counted once|own gradient divided by W",
)
LAST_MICROBATCH_OF_THE_LOCAL_GRADIENT_OVER_W = cause(
    "last microbatch of the local gradient / W",
    of=("gradient",),
    shows="Each rank holds its own gradient of the last microbatch, divided by W.",
    usual="Nothing is reduced, and each microbatch overwrites the one before.",
    attributed=r"own gradient alone, of the last microbatch alone",
)
LOCAL_GRADIENT_OVER_W_ACCUMULATOR_RESCALED = cause(
    "local gradient / W, accumulator rescaled",
    of=("gradient",),
    shows="Each rank holds its own gradients, earlier microbatches divided by W several times.",
    usual="Nothing is reduced, and the accumulated gradient is divided with each microbatch.",
)
LAST_MICROBATCH_ONLY = cause(
    "last microbatch only",
    of=("gradient",),
    shows="Only the last microbatch is in the gradient.",
    usual="Each microbatch overwrites the gradient buffer.",
    attributed=r"only microbatch \d+ \(the last",
)
LAST_MICROBATCH_ONLY_TIMES_GA = cause(
    "last microbatch only x GA",
    of=("gradient",),
    shows="Only the last microbatch is in the gradient, not divided by the number of microbatches.",
    usual="Each microbatch overwrites the gradient buffer, and the mean over them is not taken.",
    attributed=r"only microbatch \d+ \(the last of \d+\) is in it, \S+ times",
)
MICROBATCH_DROPPED = cause(
    "microbatch dropped",
    of=("gradient", "loss"),
    shows="One microbatch is missing from the sum, or several.",
    usual="The first or last microbatch is outside of the accumulation, or an event is lost.",
    attributed=r"of \d+ counts? 0 times|only microbatch|it is 0: no local",
)
MICROBATCH_DOUBLED = cause(
    "microbatch doubled",
    of=("gradient", "loss"),
    shows="One microbatch is in the sum twice.",
    usual="A buffer is added once more when it is flushed.",
    attributed=r"counts? 2 times",
)
ACCUMULATOR_RESCALED = cause(
    "accumulator rescaled",
    of=("gradient",),
    shows="With each further microbatch, earlier ones are divided or multiplied by the number of "
    "ranks, or of those along an axis, once more.",
    usual="The accumulated gradient is reduced or divided again with each microbatch.",
    attributed=r"microbatch.* counts? .*1/W",
)
ONE_MICROBATCH_REDUCED = cause(
    "one microbatch reduced",
    of=("gradient",),
    shows="One microbatch is averaged over ranks, the others are each rank's own.",
    usual="Synchronisation is on for a single microbatch and covers its gradient alone.",
    attributed=r"(is|are) each rank's own",
)
ONE_MICROBATCH_NOT_REDUCED = cause(
    "one microbatch not reduced",
    of=("gradient",),
    shows="One microbatch is each rank's own, the others are averaged over ranks.",
    usual="The last microbatch is added to the sum after that was reduced.",
    attributed=r"(is|are) each rank's own",
)
GRADIENT_OF_THE_PREVIOUS_STEP = cause(
    "gradient of the previous step",
    of=("gradient", "update"),
    says="the optimizer was given the gradient of the step before",
    shows="The gradient is that of the step before.",
    usual="A parameter that is not used keeps its buffer, or a copy is taken before the new "
    "gradient is there.",
    attributed=r"\b(is|of) the gradient of the step before|of the step before in place",
)
GRADIENT_OF_THE_PREVIOUS_STEP_KEPT = cause(
    "gradient of the previous step kept",
    of=("gradient",),
    shows="The gradient of the step before is in the sum.",
    usual="Gradients are not cleared between steps.",
    attributed=r"right gradient plus the gradient of the step before",
)
GRADIENT_MISSING = cause(
    "gradient missing",
    of=("gradient",),
    shows="A parameter that was used has no gradient.",
    usual="Its hook never fired, or the gradient is released before the optimizer reads it.",
    attributed=r"is missing \(None\)",
)
GRADIENT_OF_A_FROZEN_PARAMETER = cause(
    "gradient of a frozen parameter",
    of=("gradient",),
    shows="A frozen parameter has a gradient.",
    usual="The flat buffer gives one to every parameter in it.",
    attributed=r"though the parameter is frozen",
)
NONE_BECAME_ZERO = cause(
    "none became zero",
    of=("gradient",),
    shows="A parameter that nobody used has a gradient of 0 and not None.",
    usual="Flat buffers of zeros are given to the optimizer, which then decays and counts the "
    "parameter.",
    attributed=r"exists though no rank used",
)
NOT_UNFROZEN = cause(
    "not unfrozen",
    of=("gradient", "persistent", "communication"),
    shows="A parameter that is unfrozen later is treated as frozen.",
    usual="Hooks, buckets or optimizer groups are made once, when it was frozen.",
    attributed=r"missing \(None\).*and unfrozen",
)
REDUCED_IN = family(
    "reduced in {format}",
    of=("gradient",),
    tier=2,
    shows="The gradient is right up to the round-off of a narrower format in its reduction.",
    usual="Gradients are cast before the reduction to halve its traffic.",
    format=("bf16", "fp16"),
    attributed=r"(rounded to|summed over ranks in) (bf16|fp16)",
)
RESULT_ROUNDED_TO = family(
    "reduced gradient rounded to {format}",
    of=("gradient",),
    tier=2,
    shows="The gradient is the reduced one rounded to a narrower format, that of each microbatch "
    "where each is reduced.",
    usual="The result of a reduction in fp32 is copied back into a buffer in the dtype of compute.",
    format=("bf16", "fp16"),
    attributed=r"(reduced gradient|over ranks).*was rounded to (bf16|fp16)",
)
SIGN_BEFORE_THE_REDUCTION = cause(
    "sign before the reduction",
    of=("gradient",),
    tier=2,
    shows="The gradient is the mean or the sum of the signs of local gradients.",
    usual="An optimizer that takes a sign, as Lion, takes it of each rank's gradient.",
    attributed=r"the sign was taken of",
)
ACCUMULATED_IN = family(
    "accumulated in {format}",
    of=("gradient",),
    tier=2,
    shows="The gradient is right up to the round-off of summing microbatches in a narrower format.",
    usual="Gradients are accumulated in the dtype of the parameters.",
    format=("bf16", "fp16"),
    attributed=r"summed its microbatches in (bf16|fp16)",
)
USES_ADDED_IN = family(
    "uses added in {format}",
    of=("gradient",),
    tier=2,
    shows="The gradient of a parameter that a forward uses several times is right up to the "
    "round-off of adding what its uses give in a narrower format.",
    usual="The format of the leaf (`grad_dtype`) is that of the reduction, so autograd casts what "
    "each use gives before it adds.",
    format=("bf16", "fp16"),
    attributed=r"uses.*(bf16|fp16)",
)
UNINITIALISED_MEMORY = cause(
    "uninitialised memory",
    of=("gradient", "clip", "loss", "publish", "update"),
    says="memory that was never written was read (zerocheck fills it with NaN)",
    shows="Values are NaN, with which zerocheck fills memory that nobody wrote.",
    usual="A buffer is allocated empty, and its padding or a shard is read before it is written.",
    attributed=r"is NaN",
)
SEED_FOR_ALL = cause(
    "seed for all",
    of=("gradient", "loss"),
    tier=3,
    says="its random numbers (dropout masks) are those of another rank or step, though the "
    "harness seeds no two alike: the generator was seeded again",
    shows="Ranks draw the same dropout masks.",
    usual="Every rank is seeded with the same number.",
)
DROPOUT_DRAWN_AGAIN = cause(
    "dropout drawn again",
    of=("gradient",),
    shows="The loss is right, and the gradient is that of other dropout masks.",
    usual="Activation checkpointing with `preserve_rng_state=False` around a block with dropout.",
    attributed=r"dropout masks",
)
PAST_WRAPPER_X_GA = cause(
    "past the wrapper x GA",
    of=("gradient",),
    shows="What the loss takes past the wrapper counts once for each microbatch.",
    usual="Gradients are divided by the number of microbatches at the outputs of the wrapper, and "
    "the loss is not divided.",
    attributed=r"of its use \d+ of \d+ .* counts \S+ times \((.* = )?GA",
)
PARTS_IN_ANOTHER_ORDER = cause(
    "parts in another order",
    of=("gradient",),
    shows="The gradient is that of sequences whose parts are put together in another order.",
    usual="The load of attention is balanced (zigzag), and `attach(axes=)` does not declare it.",
)
EXCHANGE_WITHOUT_ITS_GRADIENT = cause(
    "exchange without its gradient",
    of=("gradient",),
    shows="The outputs of the model are right, and gradients before an exchange of ranks are not.",
    usual="A collective of the forward has no backward, such as `dist.all_gather` of keys and "
    "values, or its backward is wrong.",
)
TIED_APART = cause(
    "tied gradients not summed",
    of=("gradient",),
    shows="A parameter that two pipeline stages share has the gradient of one of them.",
    usual="The gradients of the embedding and of the head are not summed over the two stages.",
)
OTHER_OUTPUTS = cause(
    "outputs of another model",
    of=("gradient", "loss"),
    shows="The outputs of the model are not those of the plain model for the same inputs.",
    usual="Tokens go to another expert, positions or heads are those of another part, a mask is "
    "lost, or a stage gets another microbatch.",
)
STAGES_EXCHANGE_OTHER_VALUES = cause(
    "stages exchange other values",
    of=("gradient",),
    shows="A pipeline stage gets activations or gradients that the stage beside it did not send.",
    usual="A buffer is sent before it is filled or used again too early, or a microbatch is "
    "dropped or sent twice.",
)
HINTS = frozenset((EXCHANGE_WITHOUT_ITS_GRADIENT, OTHER_OUTPUTS, STAGES_EXCHANGE_OTHER_VALUES))
"""Causes that say where a drawn case is wrong, and not how: other cases of the bug have none."""

ELEMENTS_IN_MEMORY_ORDER = cause(
    "elements in memory order",
    of=("gradient", "update"),
    says="the optimizer was given the gradient of parameters that are not contiguous in the order "
    "of memory, or took it so",
    shows="Elements of transposed parameters stand in the order of memory.",
    usual="A gradient is flattened by its storage and read by its index, or the other way round.",
)
AND_IN_MEMORY_ORDER = family(
    "{what}, elements in memory order",
    of=("gradient",),
    shows="Another wrong or partial gradient, with elements of transposed parameters in the "
    "order of memory.",
    usual="Two bugs at once: the named one, and flattening by storage.",
    what=(
        "first microbatch",
        "accumulated gradient",
        "local gradient only",
        "local gradient / W",
        "last microbatch of the local gradient / W",
        "local gradient / W, accumulator rescaled",
        "last microbatch only",
        "last microbatch only x GA",
    ),
)
