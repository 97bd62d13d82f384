"""Causes of a wrong update of an optimizer, step count or skipped step."""

from __future__ import annotations

from .registry import cause

L2_INSTEAD_OF_DECOUPLED = cause(
    "L2 instead of decoupled",
    of=("update",),
    shows="Weight decay went through the moments.",
    usual="Adam with L2 is used in place of AdamW.",
    attributed=r"the decayed parameter counts 1 - beta|the parameter counts \(1 - momentum\)",
)
STEP_OF_EACH_SHARD = cause(
    "step of each shard alone",
    of=("update",),
    shows="The update is that of the parameter's shards, each taken for a whole parameter.",
    usual="An optimizer that needs whole parameters is run on local shards.",
    attributed=r"run on the .* of each of \d+ ranks alone",
)
NORM_OF_EACH_SHARD = cause(
    "norm of each shard",
    of=("update",),
    shows="A norm or a mean over a whole parameter is that of each shard alone.",
    usual="Adafactor clips by, or scales with, the root mean square of the local tensor.",
    attributed=r"with a norm of the .* of each of \d+ ranks alone",
)
MEAN_OF_SHARD_MEANS = cause(
    "mean of shard means",
    of=("update",),
    shows="A factored state is the mean of the means of shards of unequal size.",
    usual="Means of local rows are averaged over the ranks, and not weighted by their number.",
    attributed=r"with the mean of the means of the",
)
WEIGHT_DECAY_TWICE = cause(
    "weight decay twice",
    of=("update",),
    shows="Weight decay was applied twice.",
    usual="The trainer decays, and so does the optimizer.",
    attributed=r"\(decayed twice\)|twice the weight decay",
)
WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE = cause(
    "weight decay by the corrected step size",
    of=("update",),
    shows="Weight decay was multiplied by lr / (1 - beta1^t).",
    usual="The decay is inside of the step that is bias-corrected.",
    attributed=r"(counts|=) 1 - lr / correction1 \* weight_decay",
)
WEIGHT_DECAY_MISSING = cause(
    "weight decay missing",
    of=("update",),
    shows="Weight decay was not applied.",
    usual="Options of the parameter group are lost when the optimizer is wrapped.",
    attributed=r"counts [^,]*\(no weight decay\)|without weight decay|no weight decay in",
)
WEIGHT_DECAY_AFTER_THE_UPDATE = cause(
    "weight decay after the update",
    of=("update",),
    shows="Weight decay came after the update.",
    usual="The order of the two is exchanged.",
    attributed=r"\(decayed after the update\)",
)
WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE = cause(
    "weight decay without the learning rate",
    of=("update",),
    shows="Weight decay was not multiplied by the learning rate.",
    usual="Decay is decoupled from the schedule as well.",
    attributed=r"weight_decay \(without lr\)",
)
WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS = cause(
    "weight decay on excluded parameters",
    of=("update",),
    shows="Parameters without weight decay were decayed.",
    usual="Groups are merged in the flat buffer.",
    attributed=r"weight_decay.* of another group",
)
DECOUPLED_INSTEAD_OF_L2 = cause(
    "decoupled instead of L2",
    of=("update",),
    shows="Weight decay shrank the parameter, and is in no state of SGD or Adam.",
    usual="The decay of AdamW is used with SGD or Adam.",
    attributed=r"counts 0 \(no weight decay\)|no weight decay in|weight decay decoupled",
)
GRADIENT_DAMPENED = cause(
    "gradient dampened",
    of=("update",),
    shows="The gradient entered the momentum buffer times 1 - momentum.",
    usual="The buffer is kept as a moving average, which Adam does, or dampening is set.",
    attributed=r"the gradient counts 1 - momentum",
)
LEARNING_RATE_IN_THE_MOMENTUM = cause(
    "learning rate in the momentum",
    of=("update",),
    shows="The gradient entered the momentum buffer times the learning rate.",
    usual="The form of Sutskever is used, where a schedule acts on later steps.",
    attributed=r"the gradient counts lr|the update counts -1 \(without lr\)",
)
NESTEROV_LEFT_OUT = cause(
    "nesterov left out",
    of=("update",),
    shows="The update is that of plain momentum, without Nesterov's form.",
    usual="The option is lost when the optimizer is wrapped or made again.",
    attributed=r"in the form of plain momentum",
)
NESTEROV_ADDED = cause(
    "nesterov added",
    of=("update",),
    shows="The update has Nesterov's form, which the options do not ask for.",
    usual="A fused kernel has one form only.",
    attributed=r"in Nesterov's form, which is not asked for",
)
MOMENTUM_LEFT_OUT = cause(
    "momentum left out",
    of=("update",),
    shows="The parameter moved along the gradient, and not along the momentum buffer.",
    usual="The buffer is computed after the parameter, or into another tensor.",
    attributed=r"along the gradient, and not along the momentum buffer",
)
GRADIENT_NOT_DAMPENED = cause(
    "gradient not dampened",
    of=("update",),
    shows="The gradient entered Muon's momentum buffer whole, and not times 1 - momentum.",
    usual="The buffer is that of SGD, which torch.optim.Muon averages.",
    attributed=r"the gradient counts 1 \(not dampened\)",
)
UPDATED_BY_ANOTHER_OPTIMIZER = cause(
    "updated by another optimizer",
    of=("update",),
    shows="A parameter has states of the optimizer that is for other parameters.",
    usual="Matrices and the rest are told apart after sharding, by flat shapes or by names.",
    attributed=r"states of \w+, which updates them",
)
MOMENTUM_NORMALIZED = cause(
    "momentum normalized",
    of=("update",),
    shows="Muon's momentum buffer holds the new momentum over its norm.",
    usual="Newton-Schulz divides its input in place, and a bf16 buffer is not copied before.",
    attributed=r"divided by its norm",
)
ORTHOGONALIZED_BY_SHARD = cause(
    "orthogonalized by shard",
    of=("update",),
    shows="Newton-Schulz ran on each shard of a matrix, and not on the whole matrix.",
    usual="Muon is given the local tensors, or a flat shard; the momentum is not gathered.",
    attributed=r"orthogonalized shard by shard",
)
SCALE_OF_THE_SHARD = cause(
    "scale of the shard",
    of=("update",),
    shows="The learning rate was adjusted by the shape of a shard, and not of the matrix.",
    usual="The factor is computed from the local parameter.",
    attributed=r"r of a shard",
)
SCALE_OF_THE_TRANSPOSED_MATRIX = cause(
    "scale of the transposed matrix",
    of=("update",),
    shows="The learning rate was adjusted by columns over rows.",
    usual="The matrix is stored, or turned for Newton-Schulz, the other way round.",
    attributed=r"r of the transposed matrix",
)
ANOTHER_ADJUSTMENT = cause(
    "another adjustment",
    of=("update",),
    shows="The learning rate was adjusted to the shape of the matrix by another rule, or not.",
    usual="The conventions of Jordan and of Moonshot are mixed up.",
    attributed=r"counts -lr \(without r\)|counts -lr \* (sqrt|0\.2)",
)
ORTHOGONALIZED_IN_PARTS = cause(
    "orthogonalized in parts",
    of=("update",),
    shows="Newton-Schulz ran on parts of a matrix: halves, or query, key and value.",
    usual="A fused matrix is split in one place and not in the other.",
    attributed=r"orthogonalized in \d parts",
)
NOT_ORTHOGONALIZED = cause(
    "not orthogonalized",
    of=("update",),
    shows="The parameter moved along the momentum itself.",
    usual="The matrix took the path of what is no matrix.",
    attributed=r"without orthogonalization",
)
ORTHOGONALIZED_IN_ANOTHER_DTYPE = cause(
    "orthogonalized in another dtype",
    of=("update",),
    shows="Newton-Schulz ran in fp32, and not in bf16.",
    usual="A cast is left out, or autocast decides.",
    attributed=r"orthogonalized in fp32",
)
ANOTHER_NUMBER_OF_ITERATIONS = cause(
    "another number of iterations",
    of=("update",),
    shows="Newton-Schulz took another number of iterations.",
    usual="The default of another library is used.",
    attributed=r"orthogonalized by \d iterations",
)
WEIGHT_DECAY_BY_THE_ADJUSTED_RATE = cause(
    "weight decay by the adjusted rate",
    of=("update",),
    shows="Weight decay was multiplied by the learning rate that is adjusted to the shape.",
    usual="One rate is computed for both.",
    attributed=r"with the adjusted learning rate",
)
EPS_INSIDE_THE_ROOT = cause(
    "eps inside the root",
    of=("update",),
    shows="eps was added inside of the square root.",
    usual="A formula of another optimizer is used.",
    attributed=r"eps inside of the root",
)
EPS_BEFORE_THE_BIAS_CORRECTION = cause(
    "eps before the bias correction",
    of=("update",),
    shows="eps was added before the bias correction.",
    usual="The fused form of the formula leaves the correction out of eps.",
    attributed=r"eps before the bias correction",
)
BETAS_SWAPPED = cause(
    "betas swapped",
    of=("update",),
    shows="beta1 and beta2 were exchanged.",
    usual="They are passed in the wrong order.",
    attributed=r"old moment counts beta2, where beta1|counts 1 - beta2, where 1 - beta1|exchanged",
)
OPTIONS_OF_ANOTHER_GROUP = cause(
    "options of another group",
    of=("update",),
    shows="Options of another parameter group were used.",
    usual="The flat buffer has one group for all.",
    attributed=r"of another group",
)
LEARNING_RATE_OF_ANOTHER_STEP = cause(
    "learning rate of another step",
    of=("update",),
    shows="The learning rate is that of another step.",
    usual="The schedule is stepped before the optimizer, or its state is not loaded.",
    attributed=r"lr of another step",
)
OPTION_SCALED = cause(
    "option times a number of ranks",
    of=("update",),
    tier=2,
    shows="The learning rate, weight decay or eps is multiplied or divided by a number of ranks or "
    "microbatches.",
    usual="An option is scaled with the number of ranks, as a learning rate with the batch, and "
    "the case gives it as it is to be.",
    attributed=r"(times|over) \d+, a number of",
)
GRADIENT_BEFORE_CLIPPING = cause(
    "gradient before clipping",
    of=("update",),
    shows="The optimizer was given the gradient from before clipping.",
    usual="Clipping changes another copy than the one that the optimizer reads.",
    attributed=r"the gradient from before clipping in place",
)
GRADIENT_WITH_THE_WRONG_SIGN = cause(
    "gradient with the wrong sign",
    of=("update",),
    shows="The optimizer took in the negated gradient.",
    usual="maximize is ignored or applied twice.",
    attributed=r"the gradient counts -|of the other sign",
)
NO_BIAS_CORRECTION = cause(
    "no bias correction",
    of=("update",),
    shows="The bias corrections were left out.",
    usual="The optimizer is configured without them.",
    attributed=r"without bias corrections",
)
MOMENTS_RESET = cause(
    "moments reset",
    of=("update",),
    shows="The moments of the step before were lost.",
    usual="The optimizer is built again, or its state is keyed by a tensor that was replaced.",
    attributed=r"the old (moment|buffer) counts 0, where|with states of 0",
)
SCALAR_STATE_LOST = cause(
    "scalar state lost",
    of=("update",),
    shows="A state that is one number started anew, as NAdam's product of momenta.",
    usual="A checkpoint has the states of the shape of their parameter, and the step count, alone.",
    attributed=r"state that is one number",
)
MOMENTS_SWAPPED = cause(
    "moments swapped",
    of=("update", "roundtrip", "export"),
    shows="Two states of the optimizer changed places.",
    usual="States are packed and unpacked in different orders.",
    attributed=r"exp_avg[^;]* holds? (max_)?exp_avg|it is exp_avg(_sq)?, and not exp_avg",
)
MOMENTS_OF_THE_PREVIOUS_STEP = cause(
    "moments of the previous step",
    of=("update",),
    shows="The update used moments from before this step.",
    usual="The parameter is updated before the moments are, or from a stale copy.",
    attributed=r"with (moments|the momentum buffer) from before this step",
)
STEPS_COUNTED_FROM_0 = cause(
    "steps counted from 0",
    of=("update",),
    shows="The bias corrections count the steps of this run alone.",
    usual="The step count is not restored.",
    attributed=r"that count the steps of this run alone",
)
MICROBATCHES_COUNTED_AS_STEPS = cause(
    "microbatches counted as steps",
    of=("update",),
    shows="The bias corrections count microbatches.",
    usual="The optimizer's count moves with each microbatch.",
    attributed=r"that count microbatches",
)
STEP_OFF_BY_1 = cause(
    "step off by 1",
    of=("update", "export"),
    shows="The step count is one too high or too low.",
    usual="It is moved before it is used, or after.",
    attributed=r"corrections of the (next step|step before)|step count of [^;]* one (more|less),",
)
STEP_OFF_BY_2 = cause(
    "step off by 2",
    of=("update",),
    shows="The step count is two too high or too low.",
    usual="It is moved by two owners.",
    attributed=r"corrections two steps",
)
ROUNDED_TO_BF16 = cause(
    "rounded to bf16",
    of=("update", "roundtrip", "export"),
    shows="Values are bf16 numbers.",
    usual="A master copy is held or sent in bf16.",
    attributed=r"rounded to bf16",
)
NEVER_UPDATED = cause(
    "never updated",
    of=("update",),
    shows="A parameter was not updated at all.",
    usual="No optimizer has it.",
    attributed=r"it is not updated",
)
UNTOUCHED_PARAMETER_CHANGED = cause(
    "untouched parameter changed",
    of=("update",),
    shows="A parameter without a gradient changed.",
    usual="It lies in a flat buffer that is updated as a whole.",
    attributed=r"changed, though it",
)
STEP_COUNT = cause(
    "step count",
    of=("update",),
    shows="The step count did not move by one.",
    usual="Counts are kept for each bucket, or not for parameters that were skipped.",
    attributed=r"the step count of \S+ is",
)
RANKS_DISAGREE = cause(
    "ranks disagree",
    of=("update", "clip", "damage", "durability"),
    shows="Ranks report or do different things in one step.",
    usual="A decision is taken by each rank alone and not reduced.",
    attributed=r"skip|rank",
)
STEP_SKIPPED = cause(
    "step skipped",
    of=("update",),
    shows="A step was skipped though the gradient is finite.",
    usual="An overflow of an earlier step is remembered.",
    attributed=r"skipped|step count of every tensor have the values from before the step",
)
STEP_NOT_SKIPPED = cause(
    "step not skipped",
    of=("update",),
    shows="A step was taken though the gradient is not finite.",
    usual="Overflow is looked for on the rank's own shard alone.",
    attributed=r"skipped",
)
SKIPPED_STEP_CHANGED_THE_STATE = cause(
    "skipped step changed the state",
    of=("update",),
    shows="A skipped step changed parameters or moments.",
    usual="State is changed before the decision to skip.",
    attributed=r"but it changed|but it is counted",
)
