"""Fault injected at the collectives, and its planting into any implementation.

It is entered, as a dispatch mode, around the constructor and around each step. It changes what a
rank puts into certain collectives, or what it gets out of them; all else passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...compat import Operators
from ...contract import Implementation, Step, StepReport
from ...contract.implementation import Moment
from ...errors import Unsupported
from .call import CollectiveCall, call_of


class Injection:
    """One fault on one rank. A subclass decides which calls it `changes`, and how.

    step      index of the step, -1 while the implementation is made
    moment    the last that the step reached: "", "reduced" or "clipped"
    number    number of the call among those that it may change, from 0, within the step
    changed   how many calls it has changed; the same on all ranks
    kept      for what must outlive a call
    """

    acts_on: ClassVar[str] = "collectives"
    """In words, for the reason why a case cannot show the fault."""

    def __init__(self) -> None:
        self.step = -1
        self.moment: Moment | Literal[""] = ""
        self.number = 0
        self.changed = 0
        self.kept: dict[object, list[Tensor]] = {}

    def changes(self, call: CollectiveCall) -> bool:
        """Return True if the fault is in this call. All ranks must return the same."""
        raise NotImplementedError

    def before(self, call: CollectiveCall) -> None:
        """Change this rank's input."""

    def after(self, call: CollectiveCall) -> None:
        """Change this rank's result; the call is over."""

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.number, self.moment = step, 0, ""

    def end(self) -> None:
        """End a step, finished or ended by the harness."""

    def around(self, call: CollectiveCall) -> Any:
        """Run the call with the fault in it; return the operator's result."""
        self.before(call)
        result = call.run()
        self.after(call)
        return result


class Injected(Operators):
    """Context with the fault in the collectives of this rank."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self._injection = injection

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        injection = self._injection
        call = call_of(func, args, kwargs)
        if call is None or call.world_size == 1 or not injection.changes(call):
            return func(*args, **kwargs)
        injection.changed += 1
        with torch.no_grad():
            result = injection.around(call)
        injection.number += 1
        return result


def planted(
    implementation: type[Implementation], fault: str, kind: type[Injection]
) -> type[Implementation]:
    """Return the implementation with a fault in its collectives. fault: its name.

    A case in which the implementation calls nothing that the fault changes is unsupported, with
    that reason: it says nothing of the fault.
    """

    class Planted(implementation):  # type: ignore[misc,valid-type]
        @classmethod
        def supports(cls, case: Case) -> str | None:
            if case.world_size == 1:
                return f"the injected fault {fault} needs 2 ranks or more"
            reason: str | None = super().supports(case)
            return reason

        def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
            self._zerocheck_injected = {
                **getattr(self, "_zerocheck_injected", {}),
                fault: (injection := kind()),
            }
            with Injected(injection):
                super().__init__(model, case, mesh)

        def train_step(self, step: Step) -> StepReport:
            injection = self._zerocheck_injected[fault]
            injection.begin(step.index)

            def reached(moment: Moment) -> None:
                injection.moment = moment
                step.reached(moment)

            try:
                with Injected(injection):
                    report: StepReport = super().train_step(replace(step, reached=reached))
                    return report
            finally:
                injection.end()

        def close(self) -> None:
            super().close()
            if not self._zerocheck_injected[fault].changed:
                raise Unsupported(
                    f"nothing to inject {fault} into: no {kind.acts_on} between ranks in this case"
                )

    Planted.__name__ = Planted.__qualname__ = f"{implementation.__name__}+{fault}"
    return Planted
