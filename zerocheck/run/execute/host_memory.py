"""Check that a case fits in the memory of this host, before anything of it is run.

Bytes per parameter. The judge keeps in memory what the reference has: the model with its gradients,
or, before the first step, the state of a start in mid-training; and masks: JUDGE. Each rank builds
the model, and that state; all together hold at least one copy of parameters, gradients and moments.
The ranks are done when the judge begins, so the larger of the two counts. Activations come on top:
they are unknown here.

What ranks observe, and the judge's whole vectors (judge/vectors.py: states, gradients, the local
gradients of each rank and microbatch, enclosures while a cause is sought), are in memory while half
of it is left, and else in files in the folder of TMPDIR.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ...case.schema import Case
from ...case.shapes import parameter_elements
from ...errors import UsageError
from ...machine.host import available_bytes
from ...machine.hosts import counts
from ...machine.launcher import has_launcher

JUDGE = 20
VECTORS = 120
"""The states before and after a step, two gradients and the places of their elements take half of
it; the rest is needed while a cause is sought."""
GRADIENT = 4
SCALED_GRADIENT = 12
SHARDED = 20
"""All ranks together, where each element is held once: AdamW in fp32, and what is gathered."""
MODEL = 4
STATE = 12
LARGE = 1 << 24
"""Parameters. A case with fewer fits wherever ranks do."""
SMALL = 1 << 20
"""Parameters. A few cases with fewer fit at once: one takes half a GB on eight ranks."""


class Need(NamedTuple):
    """Bytes that a case takes of this host at least: memory, and data that may be in files."""

    memory: int
    files: int


def need(case: Case) -> Need:
    """Return the bytes that a case takes, without activations and the processes themselves."""
    training = case.training
    each = SCALED_GRADIENT if training.loss_scale is not None else GRADIENT
    vectors = VECTORS + each * case.world_size * training.microbatches
    # Without a launcher all ranks are here, whatever hosts the case names.
    here = counts(case.hosts, case.world_size)[0] if has_launcher() else case.world_size
    built = MODEL + (STATE if case.start.step else 0)
    states = 3 + case.optimizer.amsgrad  # with the parameter; no optimizer has more
    observed = 4 * (training.steps + 1) * states
    observed += 4 * (training.steps + 1 + training.steps * (training.clip is not None))
    ranks = here * built + SHARDED * here // case.world_size
    elements = parameter_elements(case.model)
    return Need(elements * max(JUDGE, ranks), elements * (observed + vectors))


def granted_bytes(case: Case) -> int:
    """Return the bytes that `check` found room for; 0 for a case that fits wherever ranks do."""
    return need(case).memory if parameter_elements(case.model) >= LARGE else 0


def is_small(case: Case) -> bool:
    """Return True if ranks may have several cases like this one at once."""
    return parameter_elements(case.model) < SMALL


def must_run_alone(case: Case) -> bool:
    """Return True if the ranks should wait with the next case until this one is judged."""
    available = available_bytes()
    if parameter_elements(case.model) < LARGE or available is None:
        return False
    return 2 * (need(case).memory + need(case).files) > available


def check(cases: Iterable[Case]) -> None:
    """Raise UsageError for the first case that cannot fit, with a size that would."""
    for case in cases:
        if parameter_elements(case.model) >= LARGE:
            _check(case)


def _check(case: Case) -> None:
    available = available_bytes()
    asked = need(case)
    if available is not None and asked.memory > available:
        raise UsageError(
            f"{_name(case)} on {_ranks(case)} needs about {_gb(asked.memory)} of memory on this "
            f"host, and {_gb(available)} are available; {_what_fits(case, available)}"
        )
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if available is not None and asked.files > max(free, available // 2):
        raise UsageError(
            f"{_name(case)} on {_ranks(case)}: what the ranks hold over {case.training.steps} "
            f"steps, and the judge's vectors, take {_gb(asked.files)}, and {folder} has "
            f"{_gb(free)} free; set TMPDIR to a folder with room, on a disk"
        )


def _name(case: Case) -> str:
    user = case.model.user
    name = "the model" if user is None else user.factory
    return f"{name} ({parameter_elements(case.model) / 1e6:,.0f} million parameters)"


def _ranks(case: Case) -> str:
    count = case.training.microbatches
    more = f" with {count} microbatches" if count > 1 else ""
    return f"{case.world_size} rank{'s' * (case.world_size > 1)}{more}"


def _what_fits(case: Case, available: int) -> str:
    for size in range(case.world_size - 1, 0, -1):
        fewer = msgspec.structs.replace(case, mesh=(size,), hosts=())
        if need(fewer).memory <= available:
            return f"--world-sizes {size} would need {_gb(need(fewer).memory)}"
    most = available * parameter_elements(case.model) // need(case).memory
    return f"a model of {most / 1e6:,.0f} million parameters would fit: take fewer layers"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
