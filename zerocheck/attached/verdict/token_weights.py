"""Weights of tokens in the loss of a step: where they are declared alike, each counts as much.

A loss is a mean over its own tokens, and means of unequal numbers of tokens are then averaged over
microbatches or ranks: a token of a short microbatch counts more. No loss curve shows it.

The gradient that comes to a row of logits z is w (softmax(z) - e_y) for a cross entropy, whatever
divides the loss afterwards: w is the weight of that token, and y the one column that is negative.
So w = -g_y / (1 - p_y). The gradient is rounded in its own dtype, twice at most (unit u), and p
comes from the same logits in fp32; over the rows with p_y <= 3/4 an error of p counts at most 4
times in w, and a softmax over V columns is right to (log2(V) + 8) 2^-24 where sums are pairwise. So
two weights that are equal are found within b = 2 (2 u + 4 (log2(V) + 8) 2^-24) of each other, and a
row is that of a cross entropy to 2 b w in the sum of magnitudes. Rows that are not (label
smoothing, another loss) have no weights; in bf16 a smoothing below 2 % looks like none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from msgspec.structs import replace

from zerocheck_reference import unit_roundoff

from ... import causes as bugs
from ...protocol.verdicts import Violation

MOST = 0.75
"""Probability of the target in rows that are read, at most."""

SATURATED = 1 - 2.0**-10
"""Probability from which on a row without a gradient may be a token whose gradient vanished."""

NO_LOGITS = "no output of the model has rows of logits that got a gradient"
SURE = "every token is predicted too surely to read its weight"
OTHER_LOSS = "the loss is no cross entropy of the logits, so tokens have no weights"


class TokenWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights of the tokens of one microbatch.

    count: tokens that count; unsure: rows without a gradient that may be tokens; low, high:
    smallest and largest weight; bound: relative, of the difference of two equal ones; reason: why
    there is none, or "".
    """

    count: int = 0
    low: float = 0.0
    high: float = 0.0
    bound: float = 0.0
    reason: str = ""
    unsure: int = 0


def logits_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the output that has rows of logits: the largest one of at least two dims."""
    rows = [one for one in outputs if one.dim() > 1 and one.shape[-1] > 1 and one.numel()]
    return max(rows, key=torch.Tensor.numel, default=None)


@torch.no_grad()
def weights_of(logits: torch.Tensor | None, gradient: torch.Tensor | None) -> TokenWeights:
    """Read the weights off the gradient of logits (..., V)."""
    if logits is None or gradient is None:
        return TokenWeights(reason=NO_LOGITS)
    columns = logits.shape[-1]
    given = gradient.reshape(-1, columns).float()
    rows = given.abs().sum(1) > 0
    given = given[rows]
    every = logits.detach().reshape(-1, columns)
    unsure = int((every[~rows].float().softmax(1).amax(1) >= SATURATED).sum())
    found = every[rows].float().softmax(1)
    count = len(given)
    if not count:
        return TokenWeights(unsure=unsure)
    target = given.argmin(1, keepdim=True)
    chance = found.gather(1, target).squeeze(1)
    weights = -given.gather(1, target).squeeze(1) / (1 - chance)
    found.scatter_add_(1, target, torch.full_like(target, -1, dtype=found.dtype))
    unit = unit_roundoff(gradient.dtype)
    bound = 2 * (2 * unit + 4 * (math.log2(columns) + 8) * 2.0**-24)
    away = (given - weights[:, None] * found).abs().sum(1)
    read = chance <= MOST
    if not bool(read.any()):
        return TokenWeights(reason=SURE)
    if bool((away > 2 * bound * weights.abs())[read].any()):
        return TokenWeights(reason=OTHER_LOSS)
    weights = weights[read]
    low, high = float(weights.min()), float(weights.max())
    return TokenWeights(count, low, high, bound, unsure=unsure)


def judge_weights(
    every: Sequence[Sequence[TokenWeights]],
    *,
    step: int,
    scale: float,
    world_size: int,
    factor: float = 1.0,
) -> tuple[Violation | None, str]:
    """Judge that all tokens count alike, and that their weights add up to 1.

    every: of each rank's microbatches; scale: of the loss, which an optimizer divides by;
    world_size: what the reduction divides by, 1 for a sum; factor: by which the script multiplies
    gradients after it. Returns the violation, or the reason why nothing is judged.
    """
    there = [(r, m, one) for r, rank in enumerate(every) for m, one in enumerate(rank)]
    reason = next((one.reason for _, _, one in there if one.reason), "")
    there = [(r, m, one) for r, m, one in there if one.count]
    if reason or not there:
        return None, reason or NO_LOGITS
    bound = max(one.bound for _, _, one in there)
    least = min(there, key=lambda one: one[2].low)
    most = max(there, key=lambda one: one[2].high)
    divisor = scale * world_size / factor
    total = sum(one.count * (one.low + one.high) / 2 for _, _, one in there) / divisor
    unsure = sum(one.unsure for rank in every for one in rank) * most[2].high / divisor
    ratio = most[2].high / least[2].low if least[2].low > 0 else math.inf
    if ratio <= 1 + bound:
        if total < 1 <= total + unsure:
            return None, ""
        violation = _scaled(total, bound, step, every)
        if violation is not None and factor != 1.0:
            text = f"{violation.explanation}; each is the weight in the loss times {factor:.6g}, "
            text += "by which the script multiplies the gradient after the backward"
            violation = replace(violation, explanation=text)
        return violation, ""
    text = (
        f"a token of microbatch {most[1]} of rank {most[0]} counts {ratio:.4g} times as much as "
        f"one of microbatch {least[1]} of rank {least[0]}; they have {most[2].count} and "
        f"{least[2].count} tokens"
    )
    if most is least:
        text = f"in microbatch {most[1]} of rank {most[0]} one token counts {ratio:.4g} times as "
        text += "much as another"
    cause = ""
    if _alike([one.count * one.high for _, _, one in there], bound):
        cause = bugs.MEAN_OF_MEANS
        text += ": every microbatch counts alike, whatever number of tokens it has"
    else:
        of_rank = [sum(one.count for one in rank) for rank in every]
        if _alike([of_rank[r] * one.high for r, _, one in there], bound):
            cause = bugs.MEAN_OF_MEANS
            text += ": every rank counts alike, whatever number of tokens it has"
    ranks = tuple(dict.fromkeys((most[0], least[0])))
    return _violation(step, text, cause, ranks, ratio, 1.0, bound), ""


def _alike(values: Sequence[float], bound: float) -> bool:
    return max(values) <= min(values) * (1 + bound)


def _scaled(
    total: float, bound: float, step: int, every: Sequence[Sequence[TokenWeights]]
) -> Violation | None:
    """Return the violation where equal weights do not add up to 1."""
    if abs(total - 1) <= bound:
        return None
    ranks, microbatches = len(every), max(len(rank) for rank in every)
    tokens = sum(one.count for rank in every for one in rank)
    known = (
        (bugs.GRADIENT_TIMES_W, ranks, "the number of ranks"),
        (bugs.GRADIENT_OVER_W, 1 / ranks, "1 / the number of ranks"),
        (bugs.GRADIENT_TIMES_GA, microbatches, "the number of microbatches"),
        (bugs.GRADIENT_OVER_GA, 1 / microbatches, "1 / the number of microbatches"),
        ("", tokens, "the number of tokens: the loss is a sum over them"),
    )
    fits = [(cause, what) for cause, value, what in known if abs(total / value - 1) <= bound]
    text = f"the loss is {total:.6g} times a mean over all tokens: their weights add up to that, "
    text += "not to 1" + "".join(f"; it is {what}" for _, what in fits)
    cause = fits[0][0] if len(fits) == 1 else ""
    return _violation(step, text, cause, tuple(range(ranks)), total, 1.0, bound)


def _violation(
    step: int,
    text: str,
    cause: str,
    ranks: tuple[int, ...],
    observed: float,
    expected: float,
    bound: float,
) -> Violation:
    return Violation(
        obligation="loss",
        step=step,
        role="loss",
        tensors=(),
        ranks=ranks,
        explanation=text,
        observed=observed,
        expected=expected,
        bound=bound,
        ratio=abs(observed - expected) / bound,
        causes=(cause,) if cause else (),
    )
