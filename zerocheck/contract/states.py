"""Optimizer states by role, read from and written into the optimizers that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import Unsupported
from ..optimizers import OptimizerSpecification, StateRole, UpdateRule, known_optimizer
from .optimizers import Optimizers
from .shard import Role

Full = Mapping[tuple[str, str], torch.Tensor]
"""{(name, role): whole tensor}."""
Put = Callable[[torch.Tensor, str], None]


@dataclass(frozen=True)
class States:
    """States of the parameters: the one place from which they are read and restored.

    optimizer: that of the case; declared: `Built.states`, which comes before what the optimizers
    hold; keys: `Built.roles`, the key of each role in a state where it is not the name of the role;
    templates: per class of optimizer other than torch's, a state as it makes it.
    """

    optimizers: Optimizers
    optimizer: OptimizerSpecification
    declared: Callable[[], Mapping[torch.Tensor, Mapping[str, Any]]] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[type, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def hidden(self) -> bool:
        """True if no state is visible on this rank."""
        return self.declared is None and not self.optimizers.inner

    def of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of a parameter on this rank, empty if it has none yet."""
        if self.declared is not None:
            return self.declared().get(parameter) or {}
        return self.optimizers.state_of(parameter)

    def moments(self, parameter: torch.Tensor) -> Iterator[tuple[Role, torch.Tensor]]:
        """Iterate over (role, tensor) of each moment in the state."""
        state = self.of(parameter)
        for role in self.optimizer.states:
            tensor = state.get(self.keys.get(role, role))
            if isinstance(tensor, torch.Tensor):
                yield role, tensor

    def count(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's step count, 0-d, from its state or its group; None without one."""
        if not self.optimizer.counts_steps:
            return None
        key = self.keys.get("step", "step")
        state = self.of(parameter)
        if key in state:
            return torch.as_tensor(state[key])
        group = self._counting_group(parameter) if state else None
        return None if group is None else torch.as_tensor(group[key])

    def _counting_group(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the parameter group that counts the steps of all its parameters, if one does."""
        key = self.keys.get("step", "step")
        for group in self.optimizers.groups():
            if key in group and any(parameter is p for p in group["params"]):
                return group
        return None

    def restore(self, parameter: torch.Tensor, full: Full, name: str, into: Put) -> None:
        """Restore the states and the step count of a parameter.

        into(tensor, role): write the local part of a role into a tensor of the parameter's layout.
        Raises Unsupported for a state that cannot be written.
        """
        roles = [role for role in self.optimizer.states if (name, role) in full]
        counted = self.optimizer.counts_steps and (name, "step") in full
        if not roles and not counted:
            return
        self._check_roles(parameter, name, roles)
        entry = self._entry(parameter)
        if entry is None:
            return  # another rank has it
        for role in roles:
            # A flat parameter has one state for many names.
            key = self.keys.get(role, role)
            rule = next(one for one in self.optimizer.rules if role in one.states)
            dtype = rule.state_dtype(role, parameter.dtype)
            shape = rule.state_shape(role, parameter.dim())
            if shape is not None and shape.reduced:
                _check_plain(parameter, key)
                whole = torch.zeros_like(parameter, dtype=dtype)
                into(whole, role)
                entry[key] = shape.contracted(whole)
                continue
            moment = entry.setdefault(key, torch.zeros_like(parameter, dtype=dtype))
            into(moment, role)
        if counted:
            self._set_count(entry, parameter, full[name, "step"])
            self._set_scalars(entry, parameter, int(full[name, "step"]))

    def _set_scalars(self, entry: dict[str, Any], parameter: torch.Tensor, count: int) -> None:
        """Set the states that are one number, of an optimizer of torch that has some."""
        holder = self.optimizers.holder_of(parameter)
        known = self._known(holder)
        if holder is None or known is None:
            return
        for group in holder.param_groups:
            if any(parameter is one for one in group["params"]):
                entry.update(known.scalar_states(group, count))

    def _entry(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the state of a parameter to write into, None if this rank has none of it."""
        holder = self.optimizers.holder_of(parameter)
        if self.declared is not None:
            states = self.declared()
            if parameter not in states and holder is None and self.optimizers.inner:
                return None
            if not isinstance(states, MutableMapping):
                raise Unsupported(
                    "it cannot start in mid-training: Built.states() returns a "
                    f"{type(states).__name__}, and not the dict that the optimizer reads"
                )
            return states.setdefault(parameter, {})  # type: ignore[no-any-return]
        if holder is None and not self._is_elsewhere(parameter):
            holder = self.optimizers.inner[0]  # made before the model was wrapped
        if holder is None:
            return None
        entry: dict[str, Any] = holder.state[parameter]
        template = self.templates.get(type(holder))
        if template is not None:
            known = {self.keys.get(role, role) for role in (*self.optimizer.states, "step")}
            more = sorted(set(template) - known)
            if more:
                raise Unsupported(
                    f"it cannot start in mid-training: the state of {type(holder).__name__} has "
                    f"{', '.join(map(repr, more))} too, which no case has"
                )
        return entry

    def _check_roles(self, parameter: torch.Tensor, name: str, roles: list[StateRole]) -> None:
        """Raise Unsupported for states that the optimizer of a parameter does not have."""
        known = self._known(self.optimizers.holder_of(parameter))
        foreign = [role for role in roles if known is not None and role not in known.states]
        if known is not None and foreign:
            raise Unsupported(
                f"it cannot start in mid-training: {known.name} updates {name}, and has no "
                f"{' or '.join(foreign)}"
            )

    def _known(self, holder: torch.optim.Optimizer | None) -> UpdateRule | None:
        """Return the rule of an optimizer of torch; None where the user says what states are."""
        of_user = self.declared is not None or self.optimizer.kind == "user"
        return None if holder is None or of_user else known_optimizer(holder)

    def _is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Return True if another rank may have the state of a parameter."""
        shared = self.optimizers.opaque or not self.optimizers.inner
        return shared or self.optimizers.has_some

    def _set_count(
        self, entry: dict[str, Any], parameter: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Set a step count in the place and the type of the optimizer's."""
        key = self.keys.get("step", "step")
        if any(rule.counts_in_group for rule in self.optimizer.rules):
            for its in self.optimizers.groups():
                if any(parameter is one for one in its["params"]):
                    its[key] = int(count)
            return
        holder = self.optimizers.holder_of(parameter)
        template = self.templates.get(type(holder), {key: count})
        if key not in template:
            group = self._counting_group(parameter)
            if group is not None:
                group[key] = type(group[key])(count) if _number(group[key]) else count.clone()
            return
        kind = type(template[key])
        entry[key] = kind(count) if _number(template[key]) else on_device_of(count, parameter)


def on_device_of(step: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Copy a step count of the start state to its device.

    A count that is not on the CPU belongs to a kernel that needs it on its parameter's device,
    which may be offloaded.
    """
    return step.clone() if step.device.type == "cpu" else step.to(parameter.device, copy=True)


def _check_plain(parameter: torch.Tensor, key: str) -> None:
    """Raise Unsupported for a factored state of a sharded parameter: each class shards its own."""
    if isinstance(parameter, DTensor):
        raise Unsupported(
            f"it cannot start in mid-training: {key} has one value for several elements of a "
            "DTensor, and how it is sharded is for its class to say"
        )


def _number(value: object) -> bool:
    return isinstance(value, int | float)
