"""Results of `zerocheck checkpoint`; `--json` writes these structs unchanged."""

from __future__ import annotations

import msgspec

from ..errors import ExitCode

VERSION = 1


class CheckpointProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Error in a checkpoint, or difference between two.

    check: a key of CHECKS; where: the tensor with its role, or the file; detail: the error or
    difference, with figures; file: missing file that it follows from, or "".
    """

    check: str
    where: str
    detail: str
    file: str = ""


class RoleTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one role: how many, elements, bytes, and their dtypes."""

    role: str
    tensors: int
    elements: int
    nbytes: int
    dtypes: tuple[str, ...]


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A param group: the names of its parameters and its settings, as text."""

    parameters: tuple[str, ...]
    settings: dict[str, str]


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one checkpoint.

    psi: elements of the parameters with optimizer state; steps: each step count that occurs, with
    the number of parameters that have it.
    """

    path: str
    format: str
    roles: tuple[RoleTotal, ...]
    psi: int
    steps: dict[str, int]
    groups: tuple[GroupSettings, ...]


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings in one checkpoint, or between two.

    checked: the checks that were made; unchecked: those that could not be, and why; notes: worth
    knowing and not wrong; verified, unverifiable: properties that the files' format allows to
    verify, and those that it does not, in words. intact: of one checkpoint, the number of tensors
    of each role that no finding names; loads: where it can be loaded. The exit code is 1 if there
    are findings.
    """

    version: int = VERSION
    checkpoints: tuple[CheckpointSummary, ...]
    findings: tuple[CheckpointProblem, ...]
    checked: tuple[str, ...]
    unchecked: dict[str, str]
    notes: tuple[str, ...]
    verified: tuple[str, ...] = ()
    unverifiable: tuple[str, ...] = ()
    intact: dict[str, int] = {}
    loads: str = ""

    @property
    def exit_code(self) -> ExitCode:
        """FAILS with findings, else HOLDS."""
        return ExitCode.FAILS if self.findings else ExitCode.HOLDS


UNREAD = "unread"
"""Check of what is of a kind that is not read, which says nothing of its values."""
CHECKS = {
    "files": "files that are missing, truncated, or that nothing names",
    "tiling": "chunks do not cover a tensor exactly once",
    "readable": "stored bytes that are damaged: checksum, shape or dtype",
    UNREAD: "tensors of a kind that is not read: neither checked nor compared",
    "finite": "values that are not finite",
    "nonnegative": "second moments below zero, or above their maximum",
    "steps": "step counts that differ, or are no whole number from 1 on",
    "moments": "moments that are missing or have another shape",
    "bounded": "first moments that AdamW cannot have with these second moments",
    "names": "tensors in only one of the two",
    "shapes": "shapes or dtypes that differ",
    "values": "tensors that differ",
    "settings": "param groups or other values that differ",
    "recorded": "state that is not what training recorded when it was saved",
    "trained": "weights that are not what was trained",
}
EXAMINED = (
    "files", "tiling", "readable", "finite", "nonnegative", "steps", "moments", "bounded",
)  # fmt: skip
COMPARED = ("names", "shapes", "values", "steps", "settings")
