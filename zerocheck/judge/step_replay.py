"""Reference forwards and backwards of all ranks in one step, from the observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from msgspec.structs import replace

from .. import causes as bugs
from ..case.schema import Case
from ..case.segments import is_one_forward
from ..contract.semantics import Semantics
from ..execution.operator_noise import REPLICAS_EACH
from ..protocol.verdicts import Explanation, Violation
from .assemble import Observation
from .attribution.forwards import WHOLE, steps_before
from .diagnose.axes import with_repeated_biases
from .diagnose.loss import Losses, Replay, changed_parameters, equal, same
from .estimate import REPLICAS, Tolerances, estimate_by_element, estimate_by_tensor
from .expected import loss_divisor, loss_ranks
from .flat import FlatBuffer
from .layout import Buffers
from .local import LocalRunner, Passes, Scale
from .perturbation import moved
from .state import State
from .uses import UsedParts, parts_of


class StepReplay:
    """Replay of a step as the ranks ran it, or changed for a counterfactual."""

    def __init__(
        self, case: Case, observation: Observation, semantics: Semantics, runner: LocalRunner
    ) -> None:
        self.case = case
        self.observation = observation
        self.semantics = semantics
        self.runner = runner

    def passes(
        self,
        step: int,
        state: State,
        *,
        scale: Scale | None = None,
        buffers: str = "",
        otherwise: bool = False,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> Passes:
        """Run all forwards and backwards, or the forward that ends the case.

        For counterfactuals: scale, of each loss; buffers, sent as `Semantics.buffers` of this value
        says; otherwise, losses are weighted by tokens where the semantics declare the opposite;
        parameters, those that the first ranks compute with.
        """
        sent = buffers or self.semantics.buffers
        parameters = state.per_rank if parameters is None else parameters
        return self.runner.run(
            step,
            parameters,
            entering(self.observation.buffers(step - 1), sent),
            self.observation.steps(step),
            loss_divisor=loss_divisor(self.case, self.semantics),
            ranks=loss_ranks(self.case, self.semantics),
            weighted=(self.semantics.weight == "token") != otherwise,
            scales=self.observation.loss_scales(step)[: len(parameters)],
            states=self.observation.random_states(step),
            scale=scale,
            sent_each=sent == "rank0_each",
            one_forward=is_one_forward(self.case, step),
        )

    def uses(self, step: int, state: State) -> dict[str, UsedParts]:
        """Return the parts of the local gradients of parameters that are used several times."""
        with self.runner.noting_uses() as noted:
            passes = self.passes(step, state)
        parts = parts_of(noted, *passes.gradients.shape[:2])
        scales = torch.tensor(self.observation.loss_scales(step)[: len(passes.losses)])
        factor = loss_ranks(self.case, self.semantics) / scales.view(-1, 1, 1)
        return {
            name: one._replace(gradients=one.gradients.double() * factor)
            for name, one in parts.items()
        }

    def added_in(self, step: int, state: State, dtype: torch.dtype) -> Passes:
        """Run all passes with the gradients of a parameter's uses added in a narrower dtype."""
        with self.runner.adding_in(dtype):
            return self.passes(step, state)

    def redrawn(self, step: int, state: State) -> Passes:
        """Run all passes with blocks that draw other random numbers in the backward."""
        with self.runner.computing_again(same_draws=False):
            return self.passes(step, state)

    def recomputed(self, step: int, state: State) -> Passes:
        """Run all passes with blocks that are computed again in the backward, as they are."""
        with self.runner.computing_again(same_draws=True):
            return self.passes(step, state)

    def past_wrapper(self, step: int, state: State, factor: float) -> Passes:
        """Run all passes with a factor on the gradients of what goes past the wrapper."""
        with self.runner.multiplying_past_wrapper(factor):
            return self.passes(step, state)

    def evaluated(self, step: int, state: State) -> list[list[float]]:
        """Compute the losses in evaluation mode, [rank][microbatch]."""
        with self.runner.evaluating():
            return self.passes(step, state).losses

    def tolerances_by_tensor(self, step: int, state: State, passes: Passes) -> Tolerances:
        """Estimate the tolerance of the step's results where kernels differ."""
        replicas = self._replicas(step, state, REPLICAS, self.runner.rounding_otherwise)
        return estimate_by_tensor(passes, list(replicas), self.runner.layout)

    def tolerances_by_element(self, step: int, state: State, passes: Passes) -> Tolerances:
        """Estimate tolerances where only the order of operations differs."""
        replicas = self._replicas(step, state, REPLICAS_EACH, self.runner.moving_operators)
        return estimate_by_element(passes, replicas, self.runner.layout)

    def _replicas(
        self,
        step: int,
        state: State,
        count: int,
        moving: Callable[[int], AbstractContextManager[Any]],
    ) -> Iterator[Passes]:
        """Iterate over replicas of the step, perturbed in parameters and in module outputs."""
        for replica in range(count):
            perturbed: list[torch.Tensor] = []
            for rank, flat in enumerate(state.per_rank):
                # One vector for all, as long as it is one.
                same = rank and flat is state.per_rank[0]
                perturbed.append(perturbed[0] if same else moved(flat, self.runner.layout, replica))
            with moving(replica):
                passes = self.passes(step, state, parameters=perturbed)
            yield passes

    def same_computation(self, step: int, state: State) -> bool:
        """Return True if the ranks' losses used the reference's operators, in its order.

        Not known, so False, where a rank recorded no graph, or has parts of it in checkpoints that
        hide what runs in the backward.
        """
        observed = self.observation.steps(step)[: len(state.per_rank)]
        if any(one.recomputed or not one.graphs for one in observed):
            return False
        with self.runner.noting_graphs() as notes:
            self.passes(step, state)
        return notes.taken() == tuple(graph for one in observed for graph in one.graphs)

    def of_other_parameters(
        self, step: int, state: State, violation: Violation, buffers: Sequence[FlatBuffer]
    ) -> Violation:
        """Return a loss's violation, and True if parameters changed in transit explain it.

        buffers: the flat ones of the implementation.
        """

        def replay(parameters: torch.Tensor, ranks: int) -> list[list[float]]:
            return self.passes(step, state, parameters=[parameters] * ranks).losses

        losses = [rank.losses for rank in self.observation.steps(step)]
        sharded = [buffer for buffer in buffers if not buffer.whole]
        return with_other_parameters(violation, losses, state.parameter, sharded, replay)

    def of_a_module(
        self,
        step: int,
        state: State,
        violation: Violation,
        mixtures: Iterable[tuple[int, str, Sequence[torch.Tensor]]],
        *,
        tolerance: float = 0.0,
        explains: Callable[[Passes], bool] = lambda _: True,
    ) -> Violation:
        """Return a violation, with the cause if one module has parameters of before.

        That may be so in some microbatches, and each may have other modules of before. mixtures:
        (steps ago, module, parameters of each rank); tolerance: that of a loss; explains: True for
        passes that show what is wrong, next to the losses, which they always must.
        """
        losses = [rank.losses for rank in self.observation.steps(step)]
        own = self.passes(step, state)
        every = range(len(own.losses[0]))
        tried: list[tuple[str, str, Passes]] = [("", "", own)]
        for ago, module, parameters in mixtures:
            # The first rank rules out nearly all.
            of_first = self.passes(step, state, parameters=parameters[:1])
            if not any(_alike(losses[:1], of_first, number, tolerance) for number in every):
                continue
            several = len(parameters) > 1
            of_all = self.passes(step, state, parameters=parameters) if several else of_first
            this = f"{module} has the parameters of {steps_before(ago)}"
            stale = ago == 1 and module == WHOLE
            cause = (
                bugs.PARAMETERS_OF_THE_PREVIOUS_STEP if stale else bugs.MODULE_OF_AN_EARLIER_STEP
            )
            tried.append((cause, this, of_all))
            fitting = [
                next((one for one in tried if _alike(losses, one[2], number, tolerance)), None)
                for number in every
            ]
            only_first = [tried[-1], *[tried[0]] * len(every[1:])]
            for chosen in ([tried[-1]] * len(every), only_first, fitting):
                found = [one for one in chosen if one is not None]
                causes = {cause for cause, _, _ in found if cause}
                if len(found) < len(every) or not causes:
                    continue
                passes = _joined([passes for _, _, passes in found])
                if same(losses, passes.losses, tolerance) and explains(passes):
                    # Where all are stale at some time, none is gathered again after the update.
                    stale = bugs.PARAMETERS_OF_THE_PREVIOUS_STEP in causes
                    words = _by_microbatch([words for _, words, _ in found])
                    return replace(
                        violation,
                        causes=(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP,) if stale else tuple(causes),
                        explanation=f"{violation.explanation}; it is that of a model in which "
                        + words,
                    )
        return violation

    def of_repeated_biases(
        self, step: int, state: State, violation: Violation, tolerance: float
    ) -> Violation:
        """Return a loss's violation, and True if repeated biases of sharded layers explain it.

        tolerance: that of a loss.
        """
        biased = with_repeated_biases(state.parameter, self.runner.layout, self.case)
        losses = [rank.losses for rank in self.observation.steps(step)]
        count = self.case.axes.size("tp")
        if not same(
            losses,
            self.passes(step, state, parameters=[biased] * len(losses)).losses,
            count * tolerance,
        ):
            return violation
        return replace(
            violation,
            causes=(bugs.BIAS_OF_EACH_TENSOR_PARALLEL_RANK,),
            explanation=violation.explanation
            + f"; the bias of row-wise layers is in it {count} times: each rank that has a part "
            "of the layer adds it",
        )


def _alike(losses: Losses, passes: Passes, number: int, tolerance: float) -> bool:
    """Return True if the losses of a microbatch are those of the passes on every rank."""
    pairs = zip(losses, passes.losses, strict=True)
    return all(len(one) > number and equal(one[number], o[number], tolerance) for one, o in pairs)


def _joined(of: Sequence[Passes]) -> Passes:
    """Return passes with microbatch i of the i-th."""
    gradients = [one.gradients[:, number : number + 1] for number, one in enumerate(of)]
    return dataclasses.replace(
        of[0],
        gradients=torch.cat(gradients, 1),
        losses=[[one.losses[r][n] for n, one in enumerate(of)] for r in range(len(of[0].losses))],
    )


def _by_microbatch(words: Sequence[str]) -> str:
    """Return what is said of each microbatch, once if it is the same."""
    if len(set(words)) == 1:
        return words[0]
    said = [f"{one} in microbatch {number}" for number, one in enumerate(words) if one]
    return ", and ".join(said) + (" alone" if "" in words else "")


def with_other_parameters(
    violation: Violation,
    observed: Losses,
    parameters: torch.Tensor,
    buffers: Sequence[FlatBuffer],
    replay: Replay,
) -> Violation:
    """Return the violation, with its causes if ranks computed with parameters changed in transit.

    parameters: the flat vector; buffers: the sharded ones; replay: see diagnose/loss.py.
    """
    sentences = changed_parameters(observed, parameters, buffers, replay)
    text = f"{violation.explanation}; in the parameters that it computed with"
    explanation = Explanation.of(sentences, sentences, text, ", ")
    if not sentences:
        return violation
    return replace(
        violation,
        causes=explanation.causes,
        explanation=explanation.text,
        sentences=explanation.sentences,
    )


def entering(before: Sequence[Buffers], sent: str) -> Sequence[Buffers]:
    """Return the buffers that each rank computes with in a step, from the previous ones.

    sent: as `Semantics.buffers`.
    """
    return before if sent == "local" else [before[0]] * len(before)
