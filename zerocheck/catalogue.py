"""The implementations that zerocheck brings along, by name. Imports no torch: the CLI lists it."""

from __future__ import annotations

from .errors import UsageError, unknown

BUILT_IN: dict[str, str] = {
    "ddp": "zerocheck.implementations.ddp:Ddp",
    "zero-redundancy": "zerocheck.implementations.zero_redundancy:ZeroRedundancy",
    "fsdp1": "zerocheck.implementations.fsdp1:Fsdp1",
    "fsdp1-grad-op": "zerocheck.implementations.fsdp1:Fsdp1GradOp",
    "fsdp1-no-shard": "zerocheck.implementations.fsdp1:Fsdp1NoShard",
    "fsdp2": "zerocheck.implementations.fsdp2:Fsdp2",
    "zero1": "zerocheck.implementations.textbook.zero1:Zero1",
    "zero2": "zerocheck.implementations.textbook.zero2:Zero2",
    "zero3": "zerocheck.implementations.textbook.zero3:Zero3",
}
"""Names of the built-in implementations, and where they are."""


def check_spelling(name: str) -> None:
    """Raise UsageError, with the nearest name, for what cannot be an implementation's name."""
    if ":" not in name and name not in BUILT_IN:
        if name.endswith(".py"):
            raise UsageError(
                f"{name!r} names a file; name the class or build function in it too: {name}:NAME"
            )
        error = unknown("implementation", name, BUILT_IN)
        raise UsageError(f"{error}; or give package.module:Name or path/to/file.py:Name")
    where, colon, attribute = name.rpartition(":")
    if colon and not (where and attribute.isidentifier()):
        raise UsageError(
            f"{name!r} is not an implementation; give package.module:Name or path/to/file.py:Name"
        )
