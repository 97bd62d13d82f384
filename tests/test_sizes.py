"""Sizes as people write them."""

from __future__ import annotations

import pytest

from zerocheck.errors import UsageError
from zerocheck.sizes import binary, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("40 gb", 40 * 10**9),
        ("1.5KiB", 1536),
        ("7 B", 7),
        ("2TB", 2 * 10**12),
        ("3 B", 3),
    ],
)
def test_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "-1GB", "0", "1e3", "80GiBs"])
def test_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_written() -> None:
    assert binary(80 * 2**30) == "80.000 GiB"
    assert binary(1023) == "1023 B" and binary(1024) == "1.000 KiB"
    assert binary(2**60) == "1024.000 PiB"
