"""Muon for matrices and AdamW for all else, as one optimizer of a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...case.optimizer_options import is_matrix_of_muon
from ...case.schema import Optimizer, OptimizerKind
from ..adamw.optimizer import AdamW
from ..specification import OptionFields, StateRole, UpdateRule
from .optimizer import Muon


class MuonWithAdamW:
    """Two optimizers of one model. Both read the learning rate and the decay of a group."""

    kind: OptimizerKind = "muon"
    name = "Muon with AdamW"
    counts_steps = True

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        self.states: tuple[StateRole, ...] = (*muon.states, *adamw.states[:2])
        self.hidden: tuple[StateRole, ...] = ()
        self.fields = OptionFields(adamw.fields.group, muon.fields.optimizer)

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Return Muon and AdamW."""
        return self._muon, self._adamw

    def rule(self, options: Optimizer, name: str, shape: Sequence[int]) -> UpdateRule:
        """Return Muon for matrices that the case does not leave to AdamW."""
        return self._muon if is_matrix_of_muon(options, name, shape) else self._adamw

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the momentum buffer and both moments."""
        return self.states

    def swaps(self, role: str) -> Sequence[tuple[str, str]]:
        """Return the moments of AdamW."""
        return self._adamw.swaps(role)

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case that a parameter group of either has."""
        return {**self._adamw.read_group(group), **self._muon.read_group(group)}
