"""Sizes as people write them."""

from __future__ import annotations

import pytest

from zerocheck.errors import UsageError
from zerocheck.sizes import binary, decimal, parse_operations, parse_rate, parse_size


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


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400GB/s", 400e9),
        ("50 GiB/s", 50 * 2**30),
        ("400Gbit/s", 50e9),
        ("400Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("1kB/s", 1000),
    ],
)
def test_speeds_of_a_link(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("400", "'400' has no unit; did you mean '400 GB/s'"),
        ("400GB", "is not the speed of a link"),
        ("fast", "is not the speed of a link"),
        ("0GB/s", "is not the speed of a link"),
        ("-1GB/s", "is not the speed of a link"),
        ("400gb/s/s", "is not the speed of a link"),
    ],
)
def test_what_is_no_speed_of_a_link(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "speed"),
    [("400T", 400e12), ("1.5P", 1.5e15), ("989 TFLOPS", 989e12), ("2gflop/s", 2e9)],
)
def test_operations(text: str, speed: float) -> None:
    assert parse_operations(text) == speed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("400", "'400' has no unit; did you mean '400T'"),
        ("400 X", "is not a number of operations"),
        ("0T", "is not a number of operations"),
        ("T", "is not a number of operations"),
    ],
)
def test_what_is_no_number_of_operations(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_operations(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (54_400_000_000, "54.4 GB"), (2.5e15, "2.5 PB")],
)
def test_decimal(size: float, text: str) -> None:
    assert decimal(size) == text
