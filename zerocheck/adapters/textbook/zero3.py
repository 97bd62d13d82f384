"""ZeRO-3: parameters are partitioned too (section 5.3 of the ZeRO paper, `P_os+g+p`).

    forward     a unit is all-gathered before use and released after it       P elements
    backward    it is gathered again, last unit first                         P elements
                its gradients are reduce-scattered when it is done            P elements
    optimizer   each rank updates its shard; there is nothing to publish

While one unit computes, the next ones are gathered and the gradients of the last one are reduced.
The root unit (whatever no other unit holds) stays gathered from the forward to the end of the
backward.
"""

from __future__ import annotations

from collections.abc import Collection

from ...case.schema import Case
from ...contract import Semantics
from ..shared.limits import same_units
from ..shared.simulation import SimulationTraits
from .reduction import Reduction
from .unit import FlatParameter, Unit, units_of
from .unit_calls import UnitSharder


class Zero3(UnitSharder):
    """One rank of ZeRO-3. Every microbatch is reduced, and the results are summed in the shard.

    Frozen parameters are sharded and gathered like others.
    """

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    stage = 3
    options = ("wrap", "bucket", "reshard", "prefetch")
    simulated = SimulationTraits(prefetch=1)

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return super().supports(case) or same_units(case)

    def _partition(self) -> None:
        """Keep a shard of the parameters and of the gradients of each unit."""
        *self.units, self.root = units_of(self.model, self.case, self.group)
        self.flats = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        self.reduction = Reduction(self.group)
        self._follow_calls()

    def flat_buffers(self) -> list[FlatParameter]:
        """Return the flat parameters of all units."""
        return self.flats

    def _before(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """Gather a unit before its call, and launch the all-gathers of the next calls."""
        unit.gather()
        for later in ahead:
            later.gather()
        unit.wait()

    def _after(self, unit: Unit, ahead: Collection[Unit]) -> None:
        """Release a unit after its call."""
        if self.case.sharding.reshard and unit not in ahead:
            unit.release()

    def _before_backward(self, number: int) -> None:
        """Reduce finished units and gather the next ones, before the backward of a call.

        Memory first: what is over is released before more is gathered. Then the all-gathers, which
        are needed soon, then the reduce-scatters, which are needed at the end.
        """
        ahead = self.order.behind(number)
        done = self._close_calls(number, ahead)
        for unit in ahead:
            unit.gather()
        for unit in done:
            unit.reduce(self.reduction)
        ahead[0].wait()

    def _close_calls(self, number: int, keep: Collection[Unit]) -> list[Unit]:
        """Close the calls after `number`; return the units whose backward is over.

        Those units are released, and units between two of their calls if the case reshards; but
        none of `keep`.
        """
        done = []
        for unit, over in self.order.close(number):
            if over:
                done.append(unit)
            if unit not in keep and (over or self.case.sharding.reshard):
                unit.release()
        return done

    def _end_microbatch(self) -> None:
        """Reduce the remaining units after a backward, the root last, and release everything.

        Units that were not called have no gradient on any rank, so there is nothing to reduce.
        """
        for unit in (*self._close_calls(-1, ()), self.root):
            unit.reduce(self.reduction)
            unit.release()
        self.reduction.finish()

    def _publish(self) -> None:
        """Round the masters, if there are any, to what the next forward gathers."""
        for flat in self.flats:
            flat.refresh()

    def close(self) -> None:
        """Drop the flat parameters, and the gradients in flight."""
        super().close()
        self.flats.clear()
        self.reduction.clear()
