"""Known causes of a wrong update: the optimizer's step with one thing changed, each compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ... import causes as bugs
from ...floating_point import Enclosure
from ...optimizers.specification import Segment, UpdateRule
from ...protocol.verdicts import Explanation
from ..compare import compare

SENTENCES = {
    bugs.ELEMENTS_IN_MEMORY_ORDER: "{optimizer} was given the gradient of parameters that are not "
    "contiguous in the order of memory, or took it so",
    bugs.L2_INSTEAD_OF_DECOUPLED: "weight decay was added to the gradient (L2), and went through "
    "the moments",
    bugs.STEP_OF_EACH_SHARD: "{optimizer}, which needs whole parameters, took each shard for one",
    bugs.NORM_OF_EACH_SHARD: "a norm or a mean over a whole parameter was that of each shard alone",
    bugs.MEAN_OF_SHARD_MEANS: "it is the mean of the means of shards, which have unequal "
    "numbers of rows",
    bugs.WEIGHT_DECAY_TWICE: "weight decay was applied twice",
    bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE: "weight decay was multiplied by lr / (1 - "
    "beta1^t), the step size, and not by lr",
    bugs.WEIGHT_DECAY_MISSING: "weight decay was not applied",
    bugs.WEIGHT_DECAY_AFTER_THE_UPDATE: "weight decay came after the update and not before it",
    bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS: "weight decay was applied to parameters that the "
    "case excludes from it",
    bugs.DECOUPLED_INSTEAD_OF_L2: "weight decay shrank the parameter (decoupled), and is in "
    "none of the states",
    bugs.GRADIENT_DAMPENED: "the gradient entered the momentum buffer times 1 - momentum "
    "(dampening)",
    bugs.LEARNING_RATE_IN_THE_MOMENTUM: "the gradient entered the momentum buffer times the "
    "learning rate",
    bugs.NESTEROV_LEFT_OUT: "Nesterov's form was left out",
    bugs.NESTEROV_ADDED: "Nesterov's form was used, which the case does not ask for",
    bugs.MOMENTUM_LEFT_OUT: "the parameter moved along the gradient, and not along the momentum "
    "buffer",
    bugs.GRADIENT_NOT_DAMPENED: "the gradient entered the momentum buffer whole, and not times 1 - "
    "momentum",
    bugs.MOMENTUM_NORMALIZED: "the momentum buffer was divided by its norm, in place",
    bugs.ORTHOGONALIZED_BY_SHARD: "Newton-Schulz ran on each shard by itself, and not on the whole "
    "matrix",
    bugs.SCALE_OF_THE_SHARD: "the learning rate was adjusted by the shape of a shard, and not by "
    "that of the matrix",
    bugs.SCALE_OF_THE_TRANSPOSED_MATRIX: "the learning rate was adjusted by columns over rows",
    bugs.ANOTHER_ADJUSTMENT: "the learning rate was adjusted to the shape by another rule, or not "
    "at all",
    bugs.ORTHOGONALIZED_IN_PARTS: "Newton-Schulz ran on parts of the matrix",
    bugs.NOT_ORTHOGONALIZED: "the parameter moved along the momentum itself, without Newton-Schulz",
    bugs.ORTHOGONALIZED_IN_ANOTHER_DTYPE: "Newton-Schulz ran in fp32, and not in bf16",
    bugs.ANOTHER_NUMBER_OF_ITERATIONS: "Newton-Schulz took another number of iterations",
    bugs.WEIGHT_DECAY_BY_THE_ADJUSTED_RATE: "weight decay was multiplied by the learning rate that "
    "is adjusted to the shape",
    bugs.EPS_INSIDE_THE_ROOT: "eps was added inside of the square root",
    bugs.EPS_BEFORE_THE_BIAS_CORRECTION: "eps was added before the bias correction",
    bugs.BETAS_SWAPPED: "beta1 and beta2 were exchanged",
    bugs.OPTIONS_OF_ANOTHER_GROUP: "the options of another parameter group were used",
    bugs.LEARNING_RATE_OF_ANOTHER_STEP: "the learning rate of another step was used",
    bugs.OPTION_SCALED: "an option of {optimizer} was multiplied or divided by a number of ranks, "
    "or of microbatches",
    bugs.GRADIENT_BEFORE_CLIPPING: "{optimizer} was given the gradient from before clipping",
    bugs.GRADIENT_TIMES_W: "{optimizer} was given the gradient times the number of ranks",
    bugs.GRADIENT_OVER_W: "{optimizer} was given the gradient divided by the number of ranks",
    bugs.LOCAL_GRADIENT_ONLY: "{optimizer} was given the local gradient of one rank",
    bugs.GRADIENT_OF_THE_PREVIOUS_STEP: "{optimizer} was given the gradient of the step before",
    bugs.NO_BIAS_CORRECTION: "the bias corrections were left out",
    bugs.SCALAR_STATE_LOST: "a state that is one number started anew, while the step count went on",
    bugs.MOMENTS_RESET: "the moments of the step before were lost",
    bugs.MOMENTS_SWAPPED: "two states of the optimizer changed places",
    bugs.MOMENTS_OF_THE_PREVIOUS_STEP: "{optimizer} computed with moments from before this step",
    bugs.STEPS_COUNTED_FROM_0: "the bias corrections count the steps of this run alone, not those "
    "before it began",
    bugs.MICROBATCHES_COUNTED_AS_STEPS: "the bias corrections count microbatches, and not steps",
    bugs.ROUNDED_TO_BF16: "it was rounded to bf16 on its way, or is held in bf16",
}


def causes(optimizer: UpdateRule, segments: Iterable[Segment]) -> tuple[str, ...]:
    """Find all candidates that explain every wrong element. segments: pieces of tensors."""
    left: dict[tuple[str, int], None] | None = None
    for segment in segments:
        found: dict[tuple[str, int], None] = {}
        yielded: Counter[str] = Counter()
        for name, enclosure in optimizer.variants(segment):
            # A name may be that of several candidates: it is the same one that must explain all.
            yielded[name] += 1
            key = name, yielded[name]
            wide = Enclosure(enclosure.exact, enclosure.bound + segment.wider)
            if (left is None or key in left) and compare(segment.observed, wide)[1] is None:
                found[key] = None
        left = found
        if not left:
            break
    return tuple(dict.fromkeys(name for name, _ in left or ()))


def explanation(optimizer: UpdateRule, role: str, names: Sequence[str]) -> Explanation:
    """Return what the causes say of a role."""
    words = {name: SENTENCES.get(name, name).format(optimizer=optimizer.name) for name in names}
    return Explanation.of(names, words, f"{role} is wrong", ": ")


def unchanged(optimizer: UpdateRule, role: str, names: Sequence[str]) -> Explanation:
    """Return what there is to say of a role that kept its values. names: of causes that give them.

    Moments that are 0 still, or a rate of 0, leave it as it was too.
    """
    text = f"{role} was not updated"
    alone = explanation(optimizer, role, names).sentences
    return Explanation(text, (bugs.NEVER_UPDATED, *names), {bugs.NEVER_UPDATED: text, **alone})
