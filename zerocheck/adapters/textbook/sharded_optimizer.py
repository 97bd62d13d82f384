"""Partitioned optimizer state, shared by all stages (section 5.1 of the paper, `P_os`).

Every rank runs the optimizer over the pieces that it owns, and over nothing else: AdamW or SGD, and
Muon over the matrices that it owns whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from ...case.schema import Case
from ...contract import Shard
from ...contract.groups import optimizer_over
from ...optimizers import optimizer_of, rule_of, states_of
from ...optimizers.state_shape import WHOLE
from .partition import Piece


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """Piece with its memory: views of the rank's parameter and gradient shards.

    They are 1-D, or in the shape of a parameter that the optimizer needs whole. trains: False if it
    is frozen at first.
    """

    piece: Piece
    parameter: torch.Tensor
    gradient: torch.Tensor
    trains: bool = True


class ShardedOptimizer:
    """Optimizer of torch over the pieces of one rank, as the case asks.

    All but Muon, and some of the user's, are elementwise, so a slice of a parameter is updated as
    it would be inside of the whole. Each slice has its own states, which keeps the options of
    parameter groups exact where one shard holds pieces of several groups.
    """

    def __init__(
        self, case: Case, owned: Sequence[OwnedPiece], group: dist.ProcessGroup, device: str = "cpu"
    ) -> None:
        self.case = case
        self.owned = list(owned)
        self.group = group
        self.device = device  # a rank that owns nothing has no tensor to tell it
        for one in self.owned:
            one.parameter.grad = one.gradient if one.trains else None
        named = [(one.piece.name, one.parameter) for one in self.owned]
        self.optimizer = optimizer_over(case, named)

    def unfreeze(self, names: Collection[str]) -> None:
        """Update these parameters from now on. The optimizer skips those without a gradient."""
        for one in self.owned:
            if one.piece.name in names:
                one.parameter.grad = one.gradient

    def given(self) -> list[torch.Tensor]:
        """Return the gradients of the pieces that are trainable now."""
        return [one.gradient for one in self.owned if one.parameter.grad is not None]

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Scale the gradient in place by min(1, max_norm / (norm + 1e-6)); return the total norm.

        The norm is over the gradient of the whole model: each rank adds the part of its pieces.
        Padding is no part of any piece. The sum is in fp64, since the square of a tiny gradient is
        0 in fp32. With a norm below `max_norm` the factor is 1.0, and no bit changes.
        """
        gradients = self.given()
        norms = [
            torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
            for gradient in gradients
            if gradient.numel()  # there is no inf-norm of nothing
        ]
        local = torch.stack(norms or [torch.zeros((), dtype=torch.float64, device=self.device)])
        if norm_type == 2.0:
            norm = local.square().sum()
            dist.all_reduce(norm, group=self.group)
            norm.sqrt_()
        else:
            norm = local.max()
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.group)
        total = norm.float()
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return float(total)

    def step(self, rates: Sequence[float]) -> None:
        """Update the pieces, with the learning rate of each parameter group."""
        groups = self.optimizer.param_groups  # of two optimizers those of one after the other
        for number, group in enumerate(groups):
            group["lr"] = rates[number % len(rates)]
        counting = any(rule.counts_in_group for rule in optimizer_of(self.case.optimizer).rules)
        for group in groups if counting else ():
            self._count_in(group)
        self.optimizer.step()
        for group in groups if counting else ():
            self._count_out(group)

    def _count_in(self, group: dict[str, Any]) -> None:
        """Set the count of a group to that of its pieces, which checkpoints have by piece."""
        states = [self.optimizer.state.get(one, {}) for one in group["params"]]
        counts = [int(state.pop("step")) for state in states if "step" in state]
        if counts:
            group["step"] = max(counts)

    def _count_out(self, group: dict[str, Any]) -> None:
        for one in group["params"]:
            if one in self.optimizer.state:
                self.optimizer.state[one]["step"] = group["step"]

    def shards(self) -> Iterator[Shard]:
        """Iterate over states and step counts. There are none before the first step."""
        for one in self.owned:
            piece = one.piece
            state = self.optimizer.state.get(one.parameter, {})
            for role in states_of(self.case.optimizer):
                if role in state:
                    yield Shard(piece.name, role, state[role], piece.shape, piece.index)
            if "step" in state:
                yield Shard(
                    piece.name, "step", torch.as_tensor(state["step"], dtype=torch.float32), ()
                )

    def gradients(self) -> Iterator[Shard]:
        """Iterate over the owned slices of the reduced gradient, without frozen parameters."""
        for one in self.owned:
            if one.parameter.grad is not None:
                piece = one.piece
                yield Shard(piece.name, "gradient", one.gradient, piece.shape, piece.index)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Restore the owned slices of the whole states, and the step counts."""
        for one in self.owned:
            piece = one.piece
            if not one.trains:
                continue
            state = self.optimizer.state[one.parameter]
            rule = rule_of(self.case.optimizer, piece.name, piece.shape)
            if (piece.name, "step") in full:
                state["step"] = rule.counted(full[piece.name, "step"])
            for role in rule.states:
                if (piece.name, role) in full:
                    whole = full[piece.name, role].reshape(-1)
                    own = whole[piece.index].view_as(one.parameter)
                    shape = rule.state_shape(role, own.dim()) or WHOLE
                    dtype = rule.state_dtype(role, own.dtype)
                    state[role] = shape.contracted(own).to(dtype)
        self.restore_scalars()

    def restore_counts(self) -> None:
        """Make a number of each step count that was read into a tensor, if the optimizer's is."""
        for one in self.owned:
            state = self.optimizer.state.get(one.parameter, {})
            if "step" in state:
                rule = rule_of(self.case.optimizer, one.piece.name, one.piece.shape)
                state["step"] = rule.counted(state["step"])

    def restore_scalars(self) -> None:
        """Compute the states that are one number, as NAdam has one, from the step counts."""
        for rule in optimizer_of(self.case.optimizer).rules if self.optimizer.state else ():
            for group in self.optimizer.param_groups if rule.scalar_names else ():
                for parameter in group["params"]:
                    state = self.optimizer.state.get(parameter, {})
                    if "step" in state:
                        state.update(rule.scalar_states(group, int(state["step"])))

    def close(self) -> None:
        """Drop all state."""
        for one in self.owned:
            one.parameter.grad = None
        self.owned.clear()
        cast(dict[torch.Tensor, object], self.optimizer.state).clear()
        self.optimizer.param_groups.clear()
