"""Errors of torch's kernels for dtypes. Imports neither torch nor any of its packages.

The process that judges takes it, for the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import Unsupported


class Refusal(NamedTuple):
    """Exception that torch raises for a model that it rejects: type, message (regex)."""

    kind: type[Exception]
    message: str


NO_KERNEL = (
    # aten/src/ATen: a kernel takes operands of one dtype, or there is none for it on the device
    Refusal(RuntimeError, r"expected scalar type \w+ but found \w+"),
    Refusal(RuntimeError, r"mixed dtype \(\w+\): expect \w+ to have scalar type of \w+"),
    Refusal(RuntimeError, r"(mat1 and mat2|m1 and m2|self and mat2) (must|to) have the same dtype"),
    Refusal(RuntimeError, r"Input type \(.*\) and (weight|bias) type \(.*\) should be the same"),
    Refusal(RuntimeError, r"not implemented for '(BFloat16|Half|Float8\w*)'"),
)


def without_kernel(error: BaseException) -> str | None:
    """Return the sentence of torch if it has no kernel for the dtypes of an operator, or None."""
    for refusal in NO_KERNEL:
        if isinstance(error, refusal.kind) and re.search(refusal.message, str(error)):
            return str(error).splitlines()[0]
    return None


@contextmanager
def refused_dtypes() -> Iterator[None]:
    """Raise Unsupported where torch has no kernel for the dtypes of the reference."""
    try:
        yield
    except RuntimeError as error:
        sentence = without_kernel(error)
        if sentence is None:
            raise
        raise Unsupported(
            f"one device cannot compute it in the declared dtypes: {sentence}"
        ) from error
